"""Measures what of a transfer a request waits for: a real prefill node's engine thread in a process of its own, and D.

Exposed: from the moment at which the step that sampled the first token returned, on P, to the moment at which D's
engine thread would have the request: its inbox was woken, and the event fetched. D computes nothing. Both are read from
CLOCK_MONOTONIC, which all processes of a host share. Hidden: from the end of the first chunk, when its blocks may
leave, to that first token.
"""

import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from kvrelay.connector.bench import Remote, busy_loops
from kvrelay.connector.bench_blocks import new_shared_pool
from kvrelay.connector.bench_sides import D_EPOCH, P_EPOCH, SECRET, DecodeSide, Woken
from kvrelay.connector.checksum import token_digest
from kvrelay.connector.factory import make_receiver, make_sender
from kvrelay.connector.receiver import Receiver
from kvrelay.engine import model_store
from kvrelay.engine.block_pool import BlockPool
from kvrelay.engine.clock import MonotonicClock
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.engine import Engine, StepOutcome
from kvrelay.engine.kv_layout import KVLayout, blocks_for
from kvrelay.engine.legs import CacheChange, Delta, Leg, Peer
from kvrelay.engine.planner import StepPlan
from kvrelay.engine.request import Request, RequestKey, SamplingParams
from kvrelay.engine.scheduler import Scheduler
from kvrelay.engine.step import Scheduled
from kvrelay.node.engine_thread import EngineThread
from kvrelay.node.report import Snapshot, Start
from kvrelay.prefill_node.admission import PrefillAdmission
from kvrelay.prefill_node.node import PrefillNode

__all__ = ["PrefillFigures", "busy_loops", "run"]
_WAIT_S = 600.0


@dataclass(frozen=True, slots=True)
class PrefillFigures:
    """A value a prompt; a shorter one before them is not counted."""

    exposed_ms: list[float]
    hidden_ms: list[float]
    prefill_ms: list[float]  # the call on P to its first token
    end_to_end_ms: list[float]  # the call on P to landed on D
    num_bytes: int  # of one prompt's KV


def run(
    config: EngineConfig,
    transport: str,
    num_tokens: int,
    chunk: int,
    num_prompts: int,
    reach: Callable[[Receiver], str] = Receiver.address,
) -> PrefillFigures:
    """Prompts one after the other, each unlike the others. `reach`: the address at which P is to find D.

    Raises: KvrelayError.
    """
    values = {"model": config.model, "threads": config.threads or 1, "dtype": config.dtype, "kernels": config.kernels}
    values |= {"block_size": config.block_size, "kv_cache_size": config.kv_cache_size, "max_num_batched_tokens": chunk}
    remote = Remote([sys.executable, "-m", "kvrelay.prefill_node.bench", json.dumps(values), transport])
    try:
        ready = remote.answer()
        layout = KVLayout(**ready["layout"])
        woken = Woken()
        num_blocks = blocks_for(num_tokens + 1, layout.block_size)
        pool, pool_fd = new_shared_pool(num_blocks * layout.block_bytes)
        receiver = make_receiver(
            region=pool.reshape(num_blocks, layout.block_bytes),
            region_fd=pool_fd,
            layout=layout,
            fingerprint=ready["fingerprint"],
            epoch=D_EPOCH,
            secret=SECRET,
            wake_up=woken.set,
            transport=transport,  # type: ignore[arg-type]
        )
        side = DecodeSide(receiver, woken)
        try:
            remote.ask(address=reach(receiver))
            remote.answer()
            side.wait_for_session()
            rng = random.Random(0)
            lengths = (min(num_tokens, 2 * chunk), *[num_tokens] * num_prompts)  # the first one warms up
            prompts = [tuple(rng.choices(range(ready["vocab_size"]), k=length)) for length in lengths]
            passes = [_prompt(remote, side, f"prompt-{i}", prompt, layout) for i, prompt in enumerate(prompts)][1:]
        finally:
            side.close()
    finally:
        remote.close()
    return PrefillFigures(
        exposed_ms=[(landed - said["sampled_ns"]) / 1e6 for said, landed in passes],
        hidden_ms=[(said["sampled_ns"] - said["first_chunk_ns"]) / 1e6 for said, _ in passes],
        prefill_ms=[(said["sampled_ns"] - said["called_ns"]) / 1e6 for said, _ in passes],
        end_to_end_ms=[(landed - said["called_ns"]) / 1e6 for said, landed in passes],
        num_bytes=blocks_for(num_tokens, layout.block_size) * layout.block_bytes,
    )


def _prompt(
    remote: Remote, side: DecodeSide, name: str, token_ids: tuple[int, ...], layout: KVLayout
) -> tuple[dict[str, int], int]:
    """What P said of one prompt, and when it landed here."""
    remote.ask(name=name, token_ids=token_ids)
    block_ids = range(blocks_for(len(token_ids), layout.block_size))
    received = side.receive([name], len(token_ids), block_ids, token_digest(token_ids), patience_s=_WAIT_S)
    return remote.answer(), received.landed_ns[0]


# --- P ------------------------------------------------------------------------------------------------------------


class _TimedEngine(Engine):
    """Remembers when its last steps returned."""

    first_chunk_ns = 0
    sampled_ns = 0

    def execute(self, plan: StepPlan, scheduled: tuple[Scheduled, ...]) -> StepOutcome:
        outcome = super().execute(plan, scheduled)
        now_ns = time.monotonic_ns()
        self.first_chunk_ns = self.first_chunk_ns or (now_ns if scheduled else 0)
        if any(row.tokens for row in outcome.outputs):
            self.sampled_ns = now_ns
        return outcome


class _Node:
    """A prefill node's core on its engine thread."""

    def __init__(self, config: EngineConfig, transport: str) -> None:
        from kvrelay.engine.model_runner import ModelRunner

        info = model_store.load_info(config.model)
        self._runner = ModelRunner.load(info, config)
        self.ready = {
            "layout": asdict(self._runner.layout),
            "fingerprint": info.fingerprint,
            "vocab_size": info.vocab_size,
        }
        clock = MonotonicClock()
        pool = BlockPool(self._runner.num_blocks, config.block_size, prefix_caching=False)
        scheduler = Scheduler(config, pool, PrefillAdmission(config.block_size, config.watermark))
        self._engine = _TimedEngine(scheduler, self._runner, (), clock, hands_over=True)
        self._thread = EngineThread(lambda error: None)
        sender = make_sender(
            region=self._runner.region,
            layout=self._runner.layout,
            fingerprint=info.fingerprint,
            epoch=P_EPOCH,
            secret=SECRET,
            wake_up=self._thread.wake,
            clock=clock,
            transport=transport,  # type: ignore[arg-type]
        )
        self._changed = threading.Condition()
        self._snapshot: Snapshot | None = None
        self._core = PrefillNode(self._engine, sender, clock, self._on_report)
        self._thread.start(self._core)

    def _on_report(self, deltas: tuple[Delta, ...], snapshot: Snapshot, change: CacheChange | None) -> None:
        with self._changed:
            self._snapshot = snapshot
            self._changed.notify_all()

    def _wait(self, condition: Callable[[Snapshot], bool]) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._snapshot and condition(self._snapshot), _WAIT_S):
                raise TimeoutError("the prefill node did not come to it")

    def serve(self, asked: dict[str, Any]) -> dict[str, int]:
        """Connect to D, or compute one prompt and hand it over."""
        if "address" in asked:
            self._thread.post(lambda: self._core.set_peers([Peer(D_EPOCH, asked["address"])]))
            self._wait(lambda snapshot: D_EPOCH in snapshot.load.sessions)
            return {}
        self._engine.first_chunk_ns = self._engine.sampled_ns = 0
        sampling = SamplingParams(max_tokens=2, temperature=0.0, seed=0, ignore_eos=True)
        key = RequestKey(asked["name"], 0)
        request = Request(key=key, prompt_token_ids=tuple(asked["token_ids"]), sampling=sampling)
        called_ns = time.monotonic_ns()
        self._thread.post(lambda: self._core.start(Start(Leg.PREFILL, request, D_EPOCH)))
        self._wait(lambda snapshot: bool(self._engine.sampled_ns) and snapshot.num_live == 0)
        engine = self._engine
        return {"called_ns": called_ns, "first_chunk_ns": engine.first_chunk_ns, "sampled_ns": engine.sampled_ns}

    def close(self) -> None:
        self._thread.stop(10.0)
        self._runner.close()


def main() -> None:
    """P: the arguments are the engine's configuration as JSON, and the transport. Until standard input ends."""
    node = _Node(replace(EngineConfig(), **json.loads(sys.argv[1])), sys.argv[2])
    _say(node.ready)
    for line in sys.stdin:
        _say(node.serve(json.loads(line)))
    node.close()


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as on a node; before torch is loaded
    main()
