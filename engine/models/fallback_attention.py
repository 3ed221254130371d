"""What the layers of a transformers model call in place of an attention of theirs: paged attention over our pool.

Two functions stand in transformers' table of attention implementations. Under `IMPLEMENTATION` a layer writes its keys
and values into the pool and attends over them; transformers then builds no mask. Under `DRY_RUN` nothing is computed:
the masks that transformers would have built, and what each layer asks for, are compared with what paged attention does,
and whatever it does not do is refused.

Shapes: T tokens, H heads, K KV heads, D head dim, V value dim, N blocks, L layers, B block size.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunction
from transformers import AttentionInterface, AttentionMaskInterface

from kvrelay.engine.batch import ForwardBatch
from kvrelay.engine.errors import ModelError
from kvrelay.kernels.base import Kernels

IMPLEMENTATION = "kvrelay"
DRY_RUN = "kvrelay_dry_run"

# What layers pass along that changes nothing here: known already, without effect outside training, or asked for by us.
_WITHOUT_EFFECT = frozenset(
    (
        "dropout",
        "is_causal",
        "output_attentions",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "use_cache",
    )
)


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """What a layer keeps for a token, and how far back it looks."""

    num_kv_heads: int
    head_dim: int
    window: int  # 0: to the beginning


@dataclass(frozen=True, slots=True)
class PagedStep:
    """What the attention of every layer needs and the model does not carry."""

    kernels: Kernels
    batch: ForwardBatch
    pool: Tensor  # [N, L, 2, K, B, D]
    windows: tuple[int, ...]

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The layers called within belong to this step."""
        token = _step.set(self)
        try:
            yield
        finally:
            _step.reset(token)


_step: ContextVar[PagedStep] = ContextVar("kvrelay_paged_step")


def register() -> None:
    """Make the implementations known to transformers. Idempotent."""
    AttentionInterface.register(IMPLEMENTATION, _attend)
    AttentionInterface.register(DRY_RUN, _note)
    AttentionMaskInterface.register(DRY_RUN, _note_mask)


def _attend(
    module: nn.Module,
    query_1HTD: Tensor,
    key_1KTD: Tensor,
    value_1KTD: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Returns [1, T, H, D], and no attention weights."""
    step = _step.get()
    layer: int = module.layer_idx  # type: ignore[assignment]
    with DisableTorchFunction():
        q_THD, k_TKD, v_TKD = (x[0].transpose(0, 1).contiguous() for x in (query_1HTD, key_1KTD, value_1KTD))
        kv_N2KBD = step.pool[:, layer]
        step.kernels.reshape_and_cache(k_TKD, v_TKD, kv_N2KBD, step.batch.slot_mapping)
        out_THD = step.kernels.paged_attention(
            q_THD,
            kv_N2KBD,
            step.batch.attention,
            scale=q_THD.shape[-1] ** -0.5 if scaling is None else scaling,
            window=step.windows[layer],
            softcap=softcap or 0.0,
        )
        return out_THD[None], None


@dataclass(slots=True)
class DryRun:
    """Gathers what each layer's attention asks for."""

    layers: dict[int, LayerAttention] = field(default_factory=dict)
    _masks: list[tuple[Tensor, int | None]] = field(default_factory=list)  # given to transformers, with their windows

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The layers called within are noted here."""
        token = _dry_run.set(self)
        try:
            yield
        finally:
            _dry_run.reset(token)

    def note_mask(self, mask: Tensor, window: int | None) -> None:
        """`window`: None if paged attention does not mask like that, which matters if a layer is given the mask."""
        self._masks.append((mask, window))

    def note_layer(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, asked: dict[str, Any]) -> None:
        """Raises: ModelError if the layer asks for what paged attention does not do."""
        name, layer = type(module).__name__, getattr(module, "layer_idx", None)
        if not isinstance(layer, int) or layer in self.layers:
            raise ModelError(f"{name} is not the attention of one layer (layer_idx = {layer})")
        unknown = sorted(key for key, value in asked.items() if value is not None and key not in _WITHOUT_EFFECT)
        if unknown:
            raise ModelError(f"the attention of layer {layer} uses {', '.join(unknown)}, which paged attention has not")
        if k.shape != v.shape:
            raise ModelError(f"layer {layer} keeps keys {_size(k)} and values {_size(v)}: they must be alike")
        if k.shape[2] != q.shape[2] or k.shape[3] != q.shape[3] or q.shape[1] % k.shape[1]:
            raise ModelError(f"layer {layer} attends with queries {_size(q)} to keys {_size(k)}")
        self.layers[layer] = LayerAttention(k.shape[1], k.shape[3], self._window(layer, mask))

    def _window(self, layer: int, mask: Any) -> int:
        """Of the mask that the layer was given, which must be one that transformers had from us, unchanged."""
        for known, window in self._masks:
            if isinstance(mask, Tensor) and mask.untyped_storage().data_ptr() == known.untyped_storage().data_ptr():
                if window is None:
                    raise ModelError(f"the attention of layer {layer} is neither causal nor in a causal sliding window")
                return window
        raise ModelError(f"layer {layer} adds a mask or position bias of its own to its attention, or has none")


_dry_run: ContextVar[DryRun] = ContextVar("kvrelay_dry_run")


def _note(
    module: nn.Module,
    query_1HTD: Tensor,
    key_1KTD: Tensor,
    value_1KTV: Tensor,
    attention_mask: Any,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,  # the mask has it too, and that is what transformers' own attention obeys
    **asked: Any,
) -> tuple[Tensor, None]:
    """Notes, and returns something of the right shape."""
    _dry_run.get().note_layer(module, query_1HTD, key_1KTD, value_1KTV, attention_mask, asked)
    return query_1HTD.transpose(1, 2), None


def _note_mask(
    *,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Tensor],
    local_size: int | None = None,
    device: torch.device,
    **_: Any,
) -> Tensor:
    """Called by transformers for each mask that a model might need."""
    window = local_size or 0
    mask = torch.ones(1, 1, q_length, kv_length, dtype=torch.bool, device=device).tril()
    _dry_run.get().note_mask(mask, window if _is_causal(mask_function, window) else None)
    return mask


def _is_causal(mask_function: Callable[..., Tensor], window: int) -> bool:
    """Whether a mask lets each position see itself and those before it, of these the window's; asked at some places."""
    reach = window or 64
    queries = torch.tensor([0, 1, reach - 1, reach, reach + 1, 2 * reach, 3 * reach + 1])[:, None]
    keys = torch.cat([queries[:, 0] - reach, queries[:, 0]])
    keys = torch.cat([keys - 1, keys, keys + 1]).clamp(min=0)[None]
    expected = (keys <= queries) & (keys > queries - window if window else keys >= 0)
    zero = torch.tensor(0)
    return torch.equal(mask_function(zero, zero, queries, keys).expand_as(expected), expected)


def _size(x: Tensor) -> str:
    return f"of {x.shape[1]} x {x.shape[3]} for {x.shape[2]} tokens"
