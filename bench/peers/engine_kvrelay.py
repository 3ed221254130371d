"""kvrelay's engine, as `kvrelay bench engine` measures it, for engine.py."""

from contextlib import ExitStack

from worker import Prompts, serve

from kvrelay import __version__
from kvrelay.cli.bench_engine import setup_line
from kvrelay.engine.bench import loaded
from kvrelay.engine.config import EngineConfig


class Kvrelay:
    def __init__(self, model: str, threads: int, stack: ExitStack) -> None:
        config = EngineConfig(model=model, threads=threads, kv_cache_size="2GiB")
        setup, self._rig = stack.enter_context(loaded(config))
        self.about = f"kvrelay {__version__}: {setup_line(setup)}"

    def decode(self, prompts: Prompts, num_steps: int) -> float:
        return self._rig.decode_batch(prompts, num_steps).tokens_per_s

    def prefill(self, prompt: list[int]) -> float:
        return self._rig.prefill_prompt(prompt).tokens_per_s


if __name__ == "__main__":
    with ExitStack() as stack:
        serve(lambda model, threads: Kvrelay(model, threads, stack))
