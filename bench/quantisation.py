"""What quantised weights cost in accuracy: each kind against the checkpoint's own weights, over one text.

    python bench/quantisation.py --model smollm2 --text LICENSE docs/architecture.md

Teacher-forced: windows of the text are computed whole, and the distributions after each token compared. Shows the
perplexity, the mean divergence from the checkpoint's distribution (KL), and how often the likeliest token is the same.
"""

import argparse
import math
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from kvrelay.engine.batch import build_batch
from kvrelay.engine.config import EngineConfig, Quantization
from kvrelay.engine.errors import ModelError
from kvrelay.engine.kv_cache import KVCache
from kvrelay.engine.kv_layout import KVLayout, blocks_for
from kvrelay.engine.model_info import ModelInfo
from kvrelay.engine.model_store import load_info
from kvrelay.engine.models.registry import load_model
from kvrelay.engine.request import Request, RequestKey, SamplingParams, Sequence
from kvrelay.engine.step import Scheduled
from kvrelay.kernels.dispatch import get_kernels

KINDS: tuple[Quantization, ...] = ("int8", "int4", "gguf")
CPU = torch.device("cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=EngineConfig.model)
    parser.add_argument("--text", nargs="+", type=Path, default=[Path("LICENSE"), Path("docs/architecture.md")])
    parser.add_argument("--window", type=int, default=512, help="tokens that are computed together")
    parser.add_argument("--max-tokens", type=int, default=6000)
    arguments = parser.parse_args()
    info = load_info(arguments.model)
    text = "\n\n".join(file.read_text() for file in arguments.text)
    ids = Tokenizer.from_file(str(info.path / "tokenizer.json")).encode(text).ids[: arguments.max_tokens]
    windows = [ids[i : i + arguments.window] for i in range(0, len(ids) - 1, arguments.window)]
    print(f"{info.name}, bfloat16, {len(ids)} tokens in windows of {arguments.window}")
    print(f"{'':6} {'perplexity':>10} {'KL, nats':>10} {'same first':>10}")
    plain = Computed(info, "none")
    for kind in KINDS:
        try:
            quantised = Computed(info, kind)
        except ModelError as error:
            print(f"{kind:6} {error}")
            continue
        sums = torch.zeros(4, dtype=torch.float64)
        for window in windows:
            sums += compare(plain.log_probabilities(window), quantised.log_probabilities(window), window)
        before, after, divergence, same = (sums / len(ids)).tolist()
        if kind == KINDS[0]:
            print(f"{'none':6} {math.exp(before):10.3f}")
        print(f"{kind:6} {math.exp(after):10.3f} {divergence:10.5f} {same:10.2%}")


def compare(expected: Tensor, found: Tensor, ids: list[int]) -> Tensor:
    """Sums over a window: surprise at its tokens in both, KL, and how often the likeliest is the same."""
    after = torch.tensor(ids[1:])[:, None]
    surprises = [-log_p[:-1].gather(1, after).double().sum() for log_p in (expected, found)]
    divergence = (expected.exp() * (expected - found)).double().sum()
    return torch.stack([*surprises, divergence, (expected.argmax(-1) == found.argmax(-1)).sum().double()])


class Computed:
    """A model with a KV pool for one window."""

    def __init__(self, info: ModelInfo, kind: Quantization) -> None:
        """Raises: ModelError."""
        self._kernels = get_kernels(CPU)
        self._model = load_model(info, torch.bfloat16, self._kernels, CPU, "auto", kind)
        self._layout = KVLayout(
            num_layers=self._model.num_layers,
            num_kv_heads=self._model.num_kv_heads,
            head_dim=self._model.head_dim,
            block_size=EngineConfig.block_size,
            dtype="bfloat16",
        )

    @torch.inference_mode()
    def log_probabilities(self, ids: list[int]) -> Tensor:
        """[tokens, vocabulary], of what comes after each token."""
        cache = KVCache(self._layout, blocks_for(len(ids), self._layout.block_size))
        sampling = SamplingParams(max_tokens=1, seed=0)
        request = Request(key=RequestKey("text", 0), prompt_token_ids=tuple(ids), sampling=sampling)
        sequence = Sequence(request=request, block_table=list(range(cache.num_blocks)))
        scheduled = [Scheduled(sequence, 0, len(ids))]
        batch = build_batch(scheduled, self._layout.block_size, self._kernels.row_multiple, CPU)
        hidden = self._model.forward(batch, cache.pool)[: len(ids)]
        return torch.cat([self._model.logits(rows).log_softmax(-1) for rows in hidden.split(64)])


if __name__ == "__main__":
    main()
