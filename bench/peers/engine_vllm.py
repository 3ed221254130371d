"""vLLM's engine for engine.py: its own scheduler, batches and compiled model, without a server and detokenisation.

It runs in this process, like kvrelay's, not in one of its own as it would otherwise.
"""

import os
import time
from collections.abc import Sequence

from worker import Prompts, serve

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import torch
import vllm


class Vllm:
    def __init__(self, model: str, threads: int) -> None:
        self._engine = vllm.LLM(model=model, dtype="bfloat16", enable_prefix_caching=True).llm_engine
        self._num_requests = 0
        self.about = f"vLLM {vllm.__version__}: bfloat16, {threads} threads, torch {torch.__version__}"

    def decode(self, prompts: Prompts, num_steps: int) -> float:
        # The first ones decode while the last are computed: a step a prompt is far more than that takes.
        counts = {self._add(prompt, num_steps + 1 + len(prompts)): 0 for prompt in prompts}
        while not all(counts.values()):
            self._step(counts)
        first = dict(counts)
        started_at = time.perf_counter()
        while min(counts[name] - first[name] for name in counts) < num_steps:
            self._step(counts)
        duration_s = time.perf_counter() - started_at
        self._engine.abort_request(list(counts))
        self._finish()
        return (sum(counts.values()) - sum(first.values())) / duration_s

    def prefill(self, prompt: Sequence[int]) -> float:
        started_at = time.perf_counter()
        counts = {self._add(prompt, 1): 0}
        while not all(counts.values()):
            self._step(counts)
        duration_s = time.perf_counter() - started_at
        self._finish()
        return len(prompt) / duration_s

    def _add(self, prompt: Sequence[int], max_tokens: int) -> str:
        self._num_requests += 1
        name = str(self._num_requests)
        sampling = vllm.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        self._engine.add_request(name, {"prompt_token_ids": list(prompt)}, sampling)
        return name

    def _step(self, counts: dict[str, int]) -> None:
        for output in self._engine.step():
            counts[output.request_id] = len(output.outputs[0].token_ids)

    def _finish(self) -> None:
        while self._engine.has_unfinished_requests():
            self._engine.step()


if __name__ == "__main__":
    serve(Vllm)
