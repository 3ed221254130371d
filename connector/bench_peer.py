"""The benchmark's P, a process of its own: `python -m kvrelay.connector.bench_peer`. Lines of JSON in, one each out."""

import json
import sys
from dataclasses import asdict
from typing import Any

from kvrelay.connector.bench_blocks import Case, fill, new_pool
from kvrelay.connector.bench_sides import P_EPOCH, SECRET, PrefillSide, Woken
from kvrelay.connector.bench_sockets import SocketSender
from kvrelay.connector.factory import make_sender
from kvrelay.connector.transport.inproc import InprocHub
from kvrelay.engine.errors import Internal, KvrelayError


class Peer:
    """Every connection to D that the benchmark has, by name: transport and case, or socket."""

    def __init__(self, size_bytes: int, hub: InprocHub | None = None) -> None:
        self.pool = new_pool(size_bytes)
        fill(self.pool)
        self._hub = hub
        self._sides: dict[str, PrefillSide] = {}
        self._sockets: dict[str, SocketSender] = {}

    def connect(self, name: str, transport: str, case: Case, address: str) -> None:
        woken = Woken()
        sender = make_sender(
            region=case.region(self.pool),
            layout=case.layout,
            fingerprint="bench",
            epoch=P_EPOCH,
            secret=SECRET,
            wake_up=woken.set,
            hub=self._hub,
            transport="auto" if transport == "inproc" else transport,  # type: ignore[arg-type]
        )
        self._sides[name] = PrefillSide(sender, woken)
        self._sides[name].connect(address)

    def connect_socket(self, name: str, address: str) -> None:
        self._sockets[name] = SocketSender(address)

    def send(self, name: str, case: Case, num_blocks: int, transfers: list[str]) -> dict[str, Any]:
        block_ids = case.order(0)[:num_blocks]
        if name in self._sockets:
            return asdict(self._sockets[name].send(case.region(self.pool), block_ids, len(transfers)))
        return asdict(self._sides[name].send(transfers, block_ids))

    def close(self) -> None:
        for side in self._sides.values():
            side.close()
        for socket_ in self._sockets.values():
            socket_.close()


def serve(peer: Peer, line: str) -> dict[str, Any]:
    """Do what one line asks for."""
    asked = json.loads(line)
    if "case" in asked:
        asked["case"] = Case(**asked["case"])
    match asked.pop("do"):
        case "connect":
            peer.connect(**asked)
        case "connect_socket":
            peer.connect_socket(**asked)
        case "send":
            return peer.send(**asked)
        case unknown:
            raise Internal(f"the benchmark's P cannot {unknown}")
    return {}


def main() -> None:
    """Until standard input ends. The first argument: bytes of the pool."""
    peer = Peer(int(sys.argv[1]))
    for line in sys.stdin:
        try:
            answer = serve(peer, line)
        except (KvrelayError, OSError) as error:
            answer = {"error": str(error)}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    peer.close()


if __name__ == "__main__":
    main()
