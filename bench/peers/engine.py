"""kvrelay's engine against a peer's, each in a process of its own, in turns: kvrelay, peer, kvrelay, peer.

    .venv/bin/python bench/peers/engine.py vllm --cores 2

Run it with nothing beside it; setup.sh makes the peers. Both get the same token ids, decode greedily and go on after
the end of text. A decode figure counts from where all sequences of the batch have a token until each has --decode-steps
more, a prefill figure from a prompt to its first token. Each has one unmeasured pass before.
"""

import json
import os
import random
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

import peers
import tyro
from tqdm import tqdm

from kvrelay.cli import bench_report as report

WARM_UP_STEPS = 4


@dataclass(frozen=True, kw_only=True)
class Options:
    peer: tyro.conf.Positional[Literal["vllm", "llama"]]
    """The peer: vLLM in bfloat16, or llama.cpp with 4-bit weights."""
    cores: int = 1
    """Cores for each of the two, with a thread on each."""
    shapes: tuple[str, ...] = (
        "decode:1:16",
        "decode:8:16",
        "decode:32:16",
        "decode:32:1024",
        "prefill:512",
        "prefill:1024",
    )
    """What is measured: decode:BATCH:CONTEXT or prefill:TOKENS."""
    decode_steps: int = 128
    """Measured steps of a decode pass."""
    repeats: int = 3
    """Measured passes of each; the table has the medians."""
    seed: int = 0
    """Seed of the prompts."""
    folder: str = str(peers.FOLDER)
    """Where setup.sh put the peers."""
    json: str = ""
    """File for all figures as JSON; -: standard output, and the table goes to standard error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One thing to measure."""

    name: str
    batch_size: int
    num_tokens: int
    num_steps: int  # 0: a prefill

    @classmethod
    def parse(cls, text: str, decode_steps: int) -> "Shape":
        kind, *numbers = text.split(":")
        try:
            if kind == "prefill":
                (num_tokens,) = map(int, numbers)
                return cls(name=f"prefill of {num_tokens:,}", batch_size=1, num_tokens=num_tokens, num_steps=0)
            if kind == "decode":
                batch_size, context = map(int, numbers)
                name = f"decode, batch {batch_size}, context {context:,}"
                return cls(name=name, batch_size=batch_size, num_tokens=context, num_steps=decode_steps)
        except ValueError:
            pass
        raise SystemExit(f"{text}: expected decode:BATCH:CONTEXT or prefill:TOKENS")

    def passes(self, repeats: int, seed: int, vocab_size: int) -> Iterator[dict[str, Any]]:
        """What to tell a worker for the unmeasured pass and then each measured one."""
        rng = random.Random(f"{seed}/{self.name}")

        def prompts() -> list[list[int]]:
            return [rng.choices(range(vocab_size), k=self.num_tokens) for _ in range(self.batch_size)]

        batch = prompts()
        for i in range(repeats + 1):
            num_steps = self.num_steps if i else min(self.num_steps, WARM_UP_STEPS)
            yield {"prompts": batch if self.num_steps else prompts(), "num_steps": num_steps}


class Worker:
    """One engine's process."""

    def __init__(self, side: peers.Side, process: subprocess.Popen[str]) -> None:
        self.name = side.name
        self._log = side.log
        self._process = process
        self.about = str(self._read()["about"])

    def measure(self, asked: dict[str, Any]) -> float:
        """Tokens a second."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return float(self._read()["tokens_per_s"])

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended: its last words are in {self._log}")
        return json.loads(line)


@contextmanager
def working(side: peers.Side, cores: Sequence[int]) -> Iterator[Worker]:
    """A worker on these cores, until the end of the block."""
    command = ["taskset", "-c", ",".join(map(str, cores)), side.python, str(peers.HERE / f"engine_{side.name}.py")]
    command += [side.model, str(len(cores))]
    with peers.started(side, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield Worker(side, process)


def run(options: Options, shapes: Sequence[Shape], workers: Sequence[Worker]) -> Iterator[dict[str, Any]]:
    """Each shape's figures, in turns."""
    for shape in tqdm(shapes, unit="shape", disable=None, leave=False):
        first, *passes = shape.passes(options.repeats, options.seed, vocab_size=49152)
        for worker in workers:
            worker.measure(first)
        rates: dict[str, list[float]] = {worker.name: [] for worker in workers}
        for asked in passes:
            for worker in workers:
                rates[worker.name].append(worker.measure(asked))
        yield {"shape": shape.name, "tokens_per_s": rates}


def table(measured: Iterable[dict[str, Any]], peer: str) -> list[str]:
    """Medians, how far they spread, and the median of the pairs' ratios."""
    rows = [["tokens/s", "kvrelay", "min - max", peer, "min - max", "kvrelay / " + peer, "min - max"]]
    for found in measured:
        ours, theirs = found["tokens_per_s"].values()
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        cells = [*spread(ours, ".1f"), *spread(theirs, ".1f"), *spread(ratios, ".2f")]
        rows.append([str(found["shape"]), *cells])
    return report.align(rows)


def spread(values: Sequence[float], form: str) -> tuple[str, str]:
    return f"{median(values):{form}}", f"{min(values):{form}} - {max(values):{form}}"


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    peers.end_cleanly_on_sigterm()
    shapes = [Shape.parse(text, options.decode_steps) for text in options.shapes]
    place = report.machine()
    cores = sorted(os.sched_getaffinity(0))[: options.cores]
    folder = Path(options.folder)
    sides = [peers.kvrelay(folder), peers.peer(options.peer, folder, cores)]
    with ExitStack() as stack:
        workers = [stack.enter_context(working(side, cores)) for side in sides]
        measured = list(run(options, shapes, workers))
    lines = [place.line(), *(f"{worker.about}, on cores {cores}" for worker in workers), ""]
    about = {worker.name: worker.about for worker in workers}
    figures = report.as_json("bench/peers/engine.py", options, place, engines=about, cores=cores, measurements=measured)
    report.publish([*lines, *table(measured, options.peer)], figures, options.json)


if __name__ == "__main__":
    main()
