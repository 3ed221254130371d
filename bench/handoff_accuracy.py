"""What a quantised hand-off costs in accuracy, and what making its bytes costs in time: each dtype against none.

    python bench/handoff_accuracy.py --model smollm2 --text LICENSE docs/architecture.md docs/log.md

Teacher-forced: the first part of each window is computed, its KV goes through what the connector does to it on P and on
D, block by block, and the rest is computed upon that. Shows the rest's perplexity, the mean divergence from the
distributions over exact KV (KL), how often the likeliest token is the same, and gigabytes of a pool's KV a second, one
thread: packing on P, widening on D.
"""

import argparse
import math
import time
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from kvrelay.connector.base import TokenRange
from kvrelay.connector.convert import Packer, widen
from kvrelay.connector.transit import Transit, agree_transit
from kvrelay.engine.batch import build_batch
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.kv_cache import KVCache
from kvrelay.engine.kv_layout import KVLayout, blocks_for
from kvrelay.engine.model_info import ModelInfo
from kvrelay.engine.model_store import load_info
from kvrelay.engine.models.registry import load_model
from kvrelay.engine.request import Request, RequestKey, SamplingParams, Sequence
from kvrelay.engine.step import Scheduled
from kvrelay.kernels.dispatch import get_kernels

CPU = torch.device("cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=EngineConfig.model)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="of both nodes' pools")
    parser.add_argument(
        "--text", nargs="+", type=Path, default=[Path(f) for f in ("LICENSE", "docs/architecture.md", "docs/log.md")]
    )
    parser.add_argument("--prompt", type=int, default=512, help="tokens that are handed over")
    parser.add_argument("--output", type=int, default=256, help="tokens that are computed upon them")
    parser.add_argument("--max-windows", type=int, default=20)
    arguments = parser.parse_args()
    info, window = load_info(arguments.model), arguments.prompt + arguments.output
    text = "\n\n".join(file.read_text() for file in arguments.text)
    ids = Tokenizer.from_file(str(info.path / "tokenizer.json")).encode(text).ids
    windows = [ids[i : i + window] for i in range(0, len(ids) - window, window)][: arguments.max_windows]
    model = Computed(info, arguments.dtype, window)
    transits = [agree_transit(model.layout, model.layout, dtype) for dtype in ("bfloat16", "int8", "fp8")]
    transits = [transit for transit in transits if not transit.is_direct]
    sums = {transit.dtype: torch.zeros(4, dtype=torch.float64) for transit in transits}
    for tokens in windows:
        exact = model.log_probabilities(tokens, arguments.prompt, None)
        for transit in transits:
            found = model.log_probabilities(tokens, arguments.prompt, transit)
            sums[transit.dtype] += compare(exact, found, tokens[arguments.prompt :])
    count = len(windows) * (arguments.output - 1)
    print(
        f"{info.name}, {arguments.dtype}, {len(windows)} prompts of {arguments.prompt} tokens, {count} tokens compared"
    )
    print(
        f"{'':9} {'bytes':>6} {'perplexity':>10} {'KL, nats':>9} {'same first':>10} {'pack GB/s':>9} {'widen GB/s':>10}"
    )
    for transit in transits:
        before, after, divergence, same = (sums[transit.dtype] / count).tolist()
        if transit is transits[0]:
            print(f"{'none':9} {1:6.1%} {math.exp(before):10.3f}")
        share = transit.block_bytes / model.layout.block_bytes
        print(f"{transit.dtype:9} {share:6.1%} {math.exp(after):10.3f} {divergence:9.5f} {same:10.2%}", end="")
        print("".join(f" {rate:10.2f}" for rate in model.rates(transit)))


def compare(expected: Tensor, found: Tensor, ids: list[int]) -> Tensor:
    """Sums: surprise at the tokens over exact and over found KV, KL, and how often the likeliest is the same."""
    after = torch.tensor(ids[1:])[:, None]
    expected, found = expected[:-1], found[:-1]
    surprises = [-log_p.gather(1, after).double().sum() for log_p in (expected, found)]
    divergence = (expected.exp() * (expected - found)).double().sum()
    return torch.stack([*surprises, divergence, (expected.argmax(-1) == found.argmax(-1)).sum().double()])


class Computed:
    """A model with a KV pool for one window."""

    def __init__(self, info: ModelInfo, dtype: str, window: int) -> None:
        self._kernels = get_kernels(CPU)
        self._model = load_model(info, getattr(torch, dtype), self._kernels, CPU, "auto")
        self.layout = KVLayout(
            num_layers=self._model.num_layers,
            num_kv_heads=self._model.num_kv_heads,
            head_dim=self._model.head_dim,
            block_size=EngineConfig.block_size,
            dtype=dtype,
        )
        self._cache = KVCache(self.layout, blocks_for(window, self.layout.block_size))

    @torch.inference_mode()
    def log_probabilities(self, ids: list[int], num_handed_over: int, transit: Transit | None) -> Tensor:
        """[tokens behind the prompt, vocabulary], of what follows each; `transit`: how the prompt's KV travelled."""
        self._compute(ids, 0, num_handed_over)
        if transit is not None:
            self._hand_over(num_handed_over, transit)
        hidden = self._compute(ids, num_handed_over, len(ids))
        return torch.cat([self._model.logits(rows).float().log_softmax(-1) for rows in hidden.split(64)])

    def rates(self, transit: Transit) -> tuple[float, float]:
        """Gigabytes of KV in the pool's own dtype a second: packed, widened. Best of five."""
        num_blocks = self._cache.num_blocks
        packer, row = Packer(transit, self._cache.region), self._cache.region[0].copy()
        pack_s, widen_s = [], []
        for _ in range(5):
            started = time.perf_counter()
            for block in range(num_blocks):
                packer.pack((block,), self._tokens_of(block), row[: transit.block_bytes])
            packed = time.perf_counter()
            rows = [row.copy() for _ in range(num_blocks)]
            copied = time.perf_counter()
            for copy in rows:
                widen(transit, copy)
            pack_s.append(packed - started)
            widen_s.append(time.perf_counter() - copied)
        size = num_blocks * self.layout.block_bytes / 1e9
        return size / min(pack_s), size / min(widen_s)

    def _tokens_of(self, block: int) -> TokenRange:
        return TokenRange(block * self.layout.block_size, (block + 1) * self.layout.block_size)

    def _hand_over(self, num_tokens: int, transit: Transit) -> None:
        packer = Packer(transit, self._cache.region)
        for block in range(blocks_for(num_tokens, self.layout.block_size)):
            row, tokens = self._cache.region[block], self._tokens_of(block)
            packed = row[: transit.block_bytes].copy()
            packer.pack((block,), replace(tokens, end=min(tokens.end, num_tokens)), packed)
            row[: transit.block_bytes] = packed
            widen(transit, row)

    def _compute(self, ids: list[int], start: int, end: int) -> Tensor:
        sampling = SamplingParams(max_tokens=1, seed=0)
        request = Request(key=RequestKey("text", 0), prompt_token_ids=tuple(ids), sampling=sampling)
        sequence = Sequence(request=request, block_table=list(range(self._cache.num_blocks)))
        batch = build_batch([Scheduled(sequence, start, end)], self.layout.block_size, self._kernels.row_multiple, CPU)
        return self._model.forward(batch, self._cache.pool)[: end - start]


if __name__ == "__main__":
    main()
