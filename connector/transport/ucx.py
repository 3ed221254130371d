"""What the two ends of the ucx transport agree on. A piece is one active message: its header, and at most 1 MiB.

Two-sided, and UCX never sees a block's address on either side: P packs pieces into buffers of its own, D fetches them
into buffers of its own and copies from there. So a stop has only our own copying to wait for, never UCX or the peer,
and what UCX leaves half done at a peer's death dies with the connection's worker.

UCX has no secrets and no encryption, and its TCP lets whoever reaches its ports write anywhere in the process: it is
for loopback and trusted networks only.
"""

NAME = "ucx"
MAX_PIECES = 4  # on their way over one connection: each has a buffer at either end
GREETING = b"kv"  # before the session's nonce: a connection's first header
GREET_S = 5.0  # for a connection to be there and say whose it is
_RDMA = " rdma"


def format_address(address: str, *, rdma: bool) -> str:
    """What D's endpoint says: where it listens, and whether it has RDMA."""
    return address + _RDMA if rdma else address


def parse_address(address: str) -> tuple[str, int, bool]:
    """(host, port, whether D has RDMA).

    Raises: ValueError.
    """
    rdma = address.endswith(_RDMA)
    host, _colon, port = address.removesuffix(_RDMA).rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port), rdma
