"""Names of KV blocks: a chained SHA-256 over token ids and over everything else that changes their KV.

    root ---> block 0 ---> block 1 ---> ...        hash(i) = SHA-256(hash(i - 1) + ids of block i), hash(-1) = root
              ids[0:B]     ids[B:2B]

So equal hashes mean equal tokens from position 0 on, under equal conditions. The encoding is fixed (little-endian
32-bit ids), so the names are the same in every process and on every machine. Only full blocks have one.
"""

import struct
from collections.abc import Iterator, Sequence as Seq
from hashlib import sha256

_VERSION = b"kvrelay-block-1"


def root_hash(cache_salt: str, *others: str) -> bytes:
    """What stands before the first block: whatever makes the KV of equal tokens differ, or keeps tenants apart.

    `others`: what else changes KV, such as an adapter's name; the order counts.
    """
    digest = sha256(_VERSION)
    for part in (cache_salt, *others):
        encoded = part.encode()
        digest.update(struct.pack("<I", len(encoded)) + encoded)
    return digest.digest()


def chain_block_hashes(token_ids: Seq[int], block_size: int, parent: bytes, first: int = 0) -> Iterator[bytes]:
    """The hash of each full block of `token_ids` from number `first` on, behind the hash `parent`."""
    pack = struct.Struct(f"<{block_size}I").pack
    for start in range(first * block_size, len(token_ids) - block_size + 1, block_size):
        parent = sha256(parent + pack(*token_ids[start : start + block_size])).digest()
        yield parent


def extend_block_hashes(hashes: list[bytes], token_ids: Seq[int], block_size: int, root: bytes) -> None:
    """Append the hashes of the full blocks of `token_ids` that `hashes` does not have yet."""
    hashes.extend(chain_block_hashes(token_ids, block_size, hashes[-1] if hashes else root, len(hashes)))


def short_name(block_hash: bytes) -> int:
    """A block's name where a wrong guess costs time and nothing else: the first 8 bytes of its hash."""
    return int.from_bytes(block_hash[:8], "little")


def block_hashes(token_ids: Seq[int], block_size: int, cache_salt: str = "") -> list[bytes]:
    """The hash of every full block of `token_ids`."""
    hashes: list[bytes] = []
    extend_block_hashes(hashes, token_ids, block_size, root_hash(cache_salt))
    return hashes
