"""Models that our decoder does not know, run by transformers' own modules over our KV pool.

Embeddings, norms, MLPs, experts and position encodings are transformers'; attention, matrix products and the KV cache
are ours. All sequences of a batch are packed in one row of tokens, told apart by their positions and, in attention, by
their block tables. Before a model is accepted it computes a few tokens, whole and in pieces beside others: what
chunking, preemption and the hand-off rely on is tried, not believed.

Shapes: T tokens of the batch, C hidden size, R rows, V vocabulary, N blocks, L layers, K KV heads, B block size, D head
dim.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from kvrelay.engine.batch import ForwardBatch, build_batch
from kvrelay.engine.errors import ModelError
from kvrelay.engine.log import fields, get_logger
from kvrelay.engine.model_info import ModelInfo
from kvrelay.engine.models.fallback_attention import IMPLEMENTATION, DryRun, LayerAttention, PagedStep
from kvrelay.engine.models.fallback_checkpoint import linear_layers, load_checkpoint, translated, weight_and_bias
from kvrelay.engine.models.fallback_exact import Audit, ExactLinear, ExactOps
from kvrelay.engine.request import Request, RequestKey, SamplingParams, Sequence
from kvrelay.engine.step import Scheduled
from kvrelay.kernels.base import Kernels

_log = get_logger(__name__)

_TRIED_TOKENS = 12
_TRIED_BLOCK_SIZE = 4
_MAX_DIFFERENCE = 0.05  # relative: rounding makes less of it, a wrong position or a lost state about 1


class FallbackModel:
    """A causal LM of transformers, taken apart: its trunk gives hidden states, what is around it logits."""

    def __init__(self, model: nn.Module, parts: "_Parts", kernels: Kernels) -> None:
        """Takes the model, whose attention is `IMPLEMENTATION` by now."""
        self.num_layers = len(parts.layers)
        self.num_kv_heads = parts.layers[0].num_kv_heads
        self.head_dim = parts.layers[0].head_dim
        self.vocab_size = parts.logits.shape[-1]
        self.kernels = kernels
        self._windows = tuple(layer.window for layer in parts.layers)
        self._exact = ExactOps(kernels)
        self._trunk = model.get_submodule(parts.trunk)
        self._given = _Given(type(parts.output))
        self._around = model
        model.set_submodule(parts.trunk, self._given)

    def forward(self, batch: ForwardBatch, pool_NL2KBD: Tensor) -> Tensor:
        """Hidden states [T, C] of the batch's tokens, whose keys and values are written into the pool."""
        step = PagedStep(self.kernels, batch, pool_NL2KBD, self._windows)
        with step.entered(), self._exact:
            out = self._trunk(input_ids=batch.token_ids[None], position_ids=batch.positions[None], use_cache=False)
        hidden_TC: Tensor = out.last_hidden_state[0]
        return hidden_TC

    def run(self, batch: ForwardBatch, pool_NL2KBD: Tensor) -> tuple[Tensor, Tensor]:
        """`forward`, and the logits of the rows that sample, one at least."""
        hidden_TC = self.forward(batch, pool_NL2KBD)
        return hidden_TC, self.logits(hidden_TC[batch.sample_rows])

    def logits(self, hidden_RC: Tensor) -> Tensor:
        """[R, V] in float32, of some rows of `forward`'s hidden states."""
        num_rows = hidden_RC.shape[0]
        hidden_1RC = pad(hidden_RC, (0, 0, 0, -num_rows % self.kernels.row_multiple))[None]
        ids = torch.zeros(hidden_1RC.shape[:2], dtype=torch.int64, device=hidden_RC.device)
        with self._given.holding(hidden_1RC), self._exact:
            logits_1RV: Tensor = self._around(input_ids=ids, use_cache=False).logits
        return logits_1RV[0, :num_rows].float()


class _Given(nn.Module):
    """Stands in the trunk's place and returns hidden states that are there already."""

    def __init__(self, output_type: type) -> None:
        super().__init__()
        self._output_type = output_type
        self._hidden: Tensor | None = None

    @contextmanager
    def holding(self, hidden_1RC: Tensor) -> Iterator[None]:
        self._hidden = hidden_1RC
        try:
            yield
        finally:
            self._hidden = None

    def forward(self, *_: Any, **__: Any) -> Any:
        return self._output_type(last_hidden_state=self._hidden)


def load_fallback(info: ModelInfo, dtype: torch.dtype, kernels: Kernels, device: torch.device) -> FallbackModel:
    """Load a model, try it, and log that it runs this way. Raises: ModelError."""
    model = load_checkpoint(info, dtype, device)
    for name in linear_layers(model):
        weight, bias = weight_and_bias(model.get_submodule(name))
        model.set_submodule(name, ExactLinear(kernels, weight, bias))
    with torch.inference_mode(), translated(info, "does not run over a paged KV pool"):
        parts = _take_apart(model)
        model.set_attn_implementation(IMPLEMENTATION)
        fallback = FallbackModel(model, parts, kernels)
        with Audit() as audit:
            logits = fallback.logits(parts.output.last_hidden_state[0])
            whole, pieces = _whole_and_in_pieces(fallback, dtype, device)
        if not _difference(logits, parts.logits) < _MAX_DIFFERENCE:
            raise ModelError("its logits are not made of its last hidden states alone")
        difference = _difference(pieces, whole)
        if not difference < _MAX_DIFFERENCE:
            raise ModelError(f"computed in pieces, its hidden states differ by {difference:.2g} of their size")
    if fallback.vocab_size != info.vocab_size:
        raise ModelError(f"{info.path}: {fallback.vocab_size} logits; config.json has vocab_size {info.vocab_size}")
    _log.info(
        "model_runs_in_transformers",
        extra=fields(
            model=info.name,
            architecture=info.architecture,
            batch_invariant=not audit.inexact and not difference,
            inexact_operations=",".join(sorted(audit.inexact)) or "none",
            difference_in_pieces=difference,
        ),
    )
    return fallback


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a dry run found: each layer's attention, the trunk's name, its output and the logits made of that."""

    layers: list[LayerAttention]
    trunk: str
    output: Any
    logits: Tensor


def _take_apart(model: Any) -> _Parts:
    """Run the model's modules without attention. Raises: ModelError if its layers are not ones that a pool holds."""
    outputs: list[tuple[str, Any]] = []

    def note(name: str, output: Any) -> None:
        if getattr(output, "last_hidden_state", None) is not None:
            outputs.append((name, output))

    hooks = [
        module.register_forward_hook(lambda _, __, output, name=name: note(name, output))
        for name, module in model.named_modules()
        if name
    ]
    positions = torch.arange(_TRIED_TOKENS, device=model.device)[None]
    ids = positions + model.config.get_text_config().vocab_size // 2  # far from those that mean padding
    dry_run = DryRun()
    with dry_run.entered():
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    for hook in hooks:
        hook.remove()
    with DryRun().entered():
        unplaced = model(input_ids=ids, use_cache=False).logits
    if not torch.equal(unplaced, logits):
        raise ModelError("its positions do not count from zero")
    if not outputs:
        raise ModelError("it has no part that gives the last hidden states")
    trunk, output = outputs[-1]
    return _Parts(_in_order(dry_run.layers, model.config), trunk, output, logits[0].float())


def _in_order(layers: dict[int, LayerAttention], config: Any) -> list[LayerAttention]:
    num_layers = config.get_text_config().num_hidden_layers
    without = sorted(set(range(num_layers)) - set(layers))
    if without or len(layers) != num_layers:
        raise ModelError(f"its layers {without} have no attention that keeps keys and values")
    if len({(layer.num_kv_heads, layer.head_dim) for layer in layers.values()}) > 1:
        raise ModelError("its layers keep keys and values of different shapes")
    return [layers[i] for i in range(num_layers)]


def _whole_and_in_pieces(model: FallbackModel, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Hidden states of some tokens, computed in one go, and in two pieces with another sequence beside them."""
    num_tokens, cut, block_size = _TRIED_TOKENS, _TRIED_TOKENS // 2 - 1, _TRIED_BLOCK_SIZE
    num_blocks = -(-num_tokens // block_size)
    shape = (2 * num_blocks, model.num_layers, 2, model.num_kv_heads, block_size, model.head_dim)
    tried, other = (
        Sequence(
            Request(
                key=RequestKey("", 0),
                prompt_token_ids=tuple(range(first, first + num_tokens)),
                sampling=SamplingParams(max_tokens=1, seed=0),
            ),
            block_table=list(range(first, first + num_blocks)),
        )
        for first in (0, num_blocks)
    )

    def run(pool: Tensor, *scheduled: Scheduled) -> Tensor:
        return model.forward(build_batch(scheduled, block_size, model.kernels.row_multiple, device), pool)

    whole = run(torch.zeros(shape, dtype=dtype, device=device), Scheduled(tried, 0, num_tokens))[:num_tokens]
    pool = torch.zeros(shape, dtype=dtype, device=device)
    first = run(pool, Scheduled(tried, 0, cut), Scheduled(other, 0, cut))[:cut]
    rest = run(pool, Scheduled(other, cut, num_tokens), Scheduled(tried, cut, num_tokens))
    return whole, torch.cat([first, rest[num_tokens - cut : 2 * (num_tokens - cut)]])


def _difference(found: Tensor, expected: Tensor) -> float:
    """Relative to the size of what is expected; not a number where either is not."""
    return float((found.float() - expected.float()).norm() / expected.float().norm())
