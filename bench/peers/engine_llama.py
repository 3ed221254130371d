"""llama.cpp for engine.py: a GGUF file, through its C interface, which decodes many sequences in one call.

Its KV is in float16, and prompts stay in it from pass to pass.
"""

import time
from collections.abc import Sequence
from pathlib import Path

import llama_cpp
import numpy as np
from worker import Prompts, serve

BATCH_TOKENS = 2048  # of one call; llama.cpp's own default


class Llama:
    def __init__(self, model: str, threads: int) -> None:
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.use_extra_bufts = False  # its code for Intel's matrix tiles ends in a segmentation fault
        self._model = llama_cpp.llama_model_load_from_file(model.encode(), params)
        assert self._model, f"{model} cannot be loaded"
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)
        self._threads = threads
        self._context = None
        self._prompts: Prompts = ()
        self.about = f"llama.cpp in llama-cpp-python {llama_cpp.__version__}: {Path(model).name}, {threads} threads"

    def decode(self, prompts: Prompts, num_steps: int) -> float:
        context_len = len(prompts[0])
        if prompts != self._prompts or context_len + num_steps + 1 > self._room:
            self._open(len(prompts), context_len + num_steps + 1)
            for number, prompt in enumerate(prompts):
                self._compute([(token, i, number) for i, token in enumerate(prompt[:-1])], num_rows=0)
            self._prompts = prompts
        memory = llama_cpp.llama_get_memory(self._context)
        for number in range(len(prompts)):
            llama_cpp.llama_memory_seq_rm(memory, number, context_len - 1, -1)
        tokens = self._step([prompt[-1] for prompt in prompts], context_len - 1)
        started_at = time.perf_counter()
        for i in range(num_steps):
            tokens = self._step(tokens, context_len + i)
        return num_steps * len(prompts) / (time.perf_counter() - started_at)

    def prefill(self, prompt: Sequence[int]) -> float:
        self._open(1, len(prompt) + 1)
        started_at = time.perf_counter()
        self._compute([(token, i, 0) for i, token in enumerate(prompt)], num_rows=1)
        return len(prompt) / (time.perf_counter() - started_at)

    def _open(self, num_sequences: int, num_tokens: int) -> None:
        """A context for so many sequences of up to so many tokens each."""
        if self._context:
            llama_cpp.llama_free(self._context)
        params = llama_cpp.llama_context_default_params()
        self._room = -(-num_tokens // 256) * 256
        params.n_ctx = num_sequences * self._room
        params.n_seq_max = num_sequences
        params.n_batch = BATCH_TOKENS
        params.n_threads = params.n_threads_batch = self._threads
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        assert self._context, f"no context for {num_sequences} sequences of {num_tokens} tokens"
        self._prompts = ()

    def _step(self, tokens: Sequence[int], place: int) -> list[int]:
        """A token of every sequence, all at one place. Returns: their next ones, the likeliest."""
        return self._compute([(token, place, number) for number, token in enumerate(tokens)], num_rows=len(tokens))

    def _compute(self, entries: Sequence[tuple[int, int, int]], num_rows: int) -> list[int]:
        """Tokens with their places and the numbers of their sequences. Returns: what follows the last `num_rows`."""
        for i in range(0, len(entries), BATCH_TOKENS):
            part = entries[i : i + BATCH_TOKENS]
            self._call(part, first_row=len(entries) - num_rows - i)
        if not num_rows:
            return []
        logits = llama_cpp.llama_get_logits(self._context)
        return np.ctypeslib.as_array(logits, shape=(num_rows, self._vocab_size)).argmax(axis=1).tolist()

    def _call(self, entries: Sequence[tuple[int, int, int]], first_row: int) -> None:
        batch = self._batch
        batch.n_tokens = len(entries)
        for i, (token, place, number) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, place, 1
            batch.seq_id[i][0], batch.logits[i] = number, i >= first_row
        failed = llama_cpp.llama_decode(self._context, batch)
        assert not failed, f"llama_decode: {failed}"


if __name__ == "__main__":
    serve(Llama)
