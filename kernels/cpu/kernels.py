"""The CPU's kernels behind the protocol that all kernels share: each operation a program of its own.

A model that knows its operations in advance runs them as one program instead (`engine/models/compiled.py`). Shapes: see
base.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvrelay.kernels.base import Activation, AttentionBatch, Draw, PackedWeight, QuantisedWeight
from kvrelay.kernels.cpu import native
from kvrelay.kernels.cpu.machine import Machine, program
from kvrelay.kernels.cpu.native import Attention, Batch, Cache, Details, Linear, Norm, Pointwise, Pool, Rotate


class CpuKernels:
    """Implements `base.Kernels` by compiled code, in float32 and bfloat16."""

    name = "cpu"
    row_multiple = 1

    def __init__(self, num_threads: int, nice: int = 0, flags: tuple[str, ...] = ()) -> None:
        """`nice`: of the threads that are started; `flags`: see `build.load`. Raises: NotBuiltError."""
        self.machine = Machine(num_threads, nice, flags)

    def pack(self, weight_OC: Tensor) -> PackedWeight:
        num_outputs, num_inputs = weight_OC.shape
        return PackedWeight(self.machine.pack(weight_OC.contiguous()), num_outputs, num_inputs)

    def pack_quantised(self, weight: QuantisedWeight) -> PackedWeight:
        num_outputs, num_inputs = weight.codes.shape
        data, form = self.machine.pack_quantised(weight)
        return PackedWeight(data, num_outputs, num_inputs, form)

    def linear(self, x_TC: Tensor, weight: PackedWeight, bias_O: Tensor | None = None) -> Tensor:
        x_TC = self._padded(x_TC)
        out_TO = x_TC.new_empty(len(x_TC), weight.num_outputs)
        bias = as_float(bias_O)
        self._run(
            x_TC.dtype,
            Linear(
                x=x_TC.data_ptr(),
                out=out_TO.data_ptr(),
                x_stride=x_TC.shape[1],
                out_stride=weight.num_outputs,
                num_weights=1,
                weights=(describe(weight),),
                biases=(address(bias),),
            ),
            Batch(num_rows=len(x_TC)),
        )
        return out_TO

    def rms_norm(self, x_TC: Tensor, weight_C: Tensor, eps: float) -> Tensor:
        return self._norm(x_TC, weight_C, None, eps, is_layer_norm=False)

    def layer_norm(self, x_TC: Tensor, weight_C: Tensor | None, bias_C: Tensor | None, eps: float) -> Tensor:
        return self._norm(x_TC, weight_C, bias_C, eps, is_layer_norm=True)

    def rotary(self, x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
        out_THD = x_THD.clone(memory_format=torch.contiguous_format)
        cosines, sines = cos_TR.contiguous(), sin_TR.contiguous()
        num_rows, num_heads, head_dim = x_THD.shape
        queries = Rotate(
            x=out_THD.data_ptr(),
            stride=num_heads * head_dim,
            num_heads=num_heads,
            head_dim=head_dim,
            num_pairs=cosines.shape[1],
            cosines=cosines.data_ptr(),
            sines=sines.data_ptr(),
        )
        self._run(x_THD.dtype, native.RotateAndCache(queries=queries), Batch(num_rows=num_rows))
        return out_THD

    def activate(self, x_TC: Tensor, activation: Activation, up_TC: Tensor | None = None) -> Tensor:
        x_TC, up_TC = x_TC.contiguous(), None if up_TC is None else up_TC.contiguous()
        out_TC = torch.empty_like(x_TC)
        num_rows, size = x_TC.shape
        op = Pointwise(
            x=x_TC.data_ptr(),
            up=address(up_TC),
            out=out_TC.data_ptr(),
            x_stride=size,
            up_stride=0 if up_TC is None else size,
            out_stride=size,
            size=size,
            kind=native.ACTIVATE if up_TC is None else native.ACTIVATE_TIMES,
            activation=native.ACTIVATIONS[activation],
        )
        self._run(x_TC.dtype, op, Batch(num_rows=num_rows))
        return out_TC

    def reshape_and_cache(self, k_TKD: Tensor, v_TKD: Tensor, kv_N2KBD: Tensor, slot_mapping_T: Tensor) -> None:
        k_TKD, v_TKD, slots = k_TKD.contiguous(), v_TKD.contiguous(), slot_mapping_T.contiguous()
        num_rows, num_kv_heads, head_dim = k_TKD.shape
        cache = Cache(
            keys=k_TKD.data_ptr(),
            values=v_TKD.data_ptr(),
            key_stride=num_kv_heads * head_dim,
            value_stride=num_kv_heads * head_dim,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
        )
        batch = Batch(num_rows=num_rows, slots=slots.data_ptr(), pool=describe_pool(kv_N2KBD))
        self._run(kv_N2KBD.dtype, native.RotateAndCache(cache=cache, caches=1), batch)

    def paged_attention(
        self,
        q_THD: Tensor,
        kv_N2KBD: Tensor,
        batch: AttentionBatch,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
    ) -> Tensor:
        q_THD = q_THD.contiguous()
        out_THD = torch.zeros_like(q_THD)
        num_rows, num_heads, head_dim = q_THD.shape
        op = Attention(
            queries=q_THD.data_ptr(),
            out=out_THD.data_ptr(),
            query_stride=num_heads * head_dim,
            out_stride=num_heads * head_dim,
            num_heads=num_heads,
            num_kv_heads=kv_N2KBD.shape[2],
            head_dim=head_dim,
            window=window,
            scale=scale,
            softcap=softcap,
        )
        starts, seq_lens = batch.query_starts.contiguous(), batch.seq_lens.contiguous()
        tables = batch.block_tables.contiguous()
        told = Batch(
            num_rows=num_rows,
            num_sequences=len(seq_lens),
            query_starts=starts.data_ptr(),
            seq_lens=seq_lens.data_ptr(),
            block_tables=tables.data_ptr(),
            table_width=tables.shape[1],
            pool=describe_pool(kv_N2KBD),
        )
        self._run(q_THD.dtype, op, told)
        return out_THD

    def scan(self, logits_RV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.machine.scan(logits_RV.contiguous())

    def draw(self, logits_RV: Tensor, draws: Sequence[Draw]) -> list[list[int]]:
        return self.machine.draw(logits_RV.contiguous(), draws)

    def total_weights(self, logits_RV: Tensor) -> Tensor:
        return self.machine.total_weights(logits_RV.contiguous())

    def likeliest(self, logits_RV: Tensor, count: int) -> Tensor:
        return self.machine.likeliest(logits_RV.contiguous(), count)

    def _norm(
        self, x_TC: Tensor, weight_C: Tensor | None, bias_C: Tensor | None, eps: float, *, is_layer_norm: bool
    ) -> Tensor:
        x_TC, weight, bias = x_TC.contiguous(), as_float(weight_C), as_float(bias_C)
        out_TC = torch.empty_like(x_TC)
        num_rows, size = x_TC.shape
        op = Norm(
            x=x_TC.data_ptr(),
            out=out_TC.data_ptr(),
            weight=address(weight),
            bias=address(bias),
            x_stride=size,
            out_stride=size,
            num_groups=1,
            size=size,
            is_layer_norm=is_layer_norm,
            eps=eps,
        )
        self._run(x_TC.dtype, op, Batch(num_rows=num_rows))
        return out_TC

    def _padded(self, x_TC: Tensor) -> Tensor:
        """With rows as long as products want them, zeros at the end, and at an address that a unit may have."""
        stride = self.machine.row_stride(x_TC.dtype, x_TC.shape[1])
        if stride == x_TC.shape[1] and (x_TC := x_TC.contiguous()).data_ptr() % 4 == 0:
            return x_TC
        padded = x_TC.new_zeros(len(x_TC), stride)
        padded[:, : x_TC.shape[1]] = x_TC
        return padded

    def _run(self, dtype: torch.dtype, details: Details, batch: Batch) -> None:
        self.machine.run(program([native.make_op(dtype, details)]), batch)


def describe(weight: PackedWeight) -> native.Weight:
    form = weight.form if isinstance(weight.form, native.Form) else native.Form()
    return native.Weight(weight.data.data_ptr(), weight.num_inputs, weight.num_outputs, form)


def describe_pool(kv_N2KBD: Tensor, layer_stride: int = 0) -> Pool:
    """One layer's part of a pool, or the first layer's, and how far the next is."""
    num_blocks, _, _, block_size, head_dim = kv_N2KBD.shape
    block_stride, kv_stride, head_stride, slot_stride, one = kv_N2KBD.stride()
    assert (slot_stride, one) == (head_dim, 1), "a slot's elements lie together, and a head's slots"
    return Pool(
        data=kv_N2KBD.data_ptr(),
        num_blocks=num_blocks,
        block_size=block_size,
        block_stride=block_stride,
        layer_stride=layer_stride,
        kv_stride=kv_stride,
        head_stride=head_stride,
    )


def as_float(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.float().contiguous()


def address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
