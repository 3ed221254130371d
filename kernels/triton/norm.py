"""RMSNorm in Triton: one program a row, sums in float32. Shapes: see base."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_MAX_COLUMNS = 4096  # of a row at once: what a program's registers hold


def rms_norm(x_TC: Tensor, weight_C: Tensor, eps: float) -> Tensor:
    num_rows, size = x_TC.shape
    out_TC = torch.empty(x_TC.shape, dtype=x_TC.dtype, device=x_TC.device)
    if num_rows:
        columns = min(triton.next_power_of_2(size), _MAX_COLUMNS)
        _rms_norm[(num_rows,)](
            x_TC, weight_C, out_TC, *x_TC.stride(), *weight_C.stride(), *out_TC.stride(), size, eps, COLUMNS=columns
        )
    return out_TC


@triton.jit
def _rms_norm(
    x,
    weight,
    out,
    x_row_stride,
    x_stride,
    weight_stride,
    out_row_stride,
    out_stride,
    size,
    eps,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    # One sum a column of the program, added up at the end: the order depends on the row's size alone.
    squares = tl.zeros([COLUMNS], dtype=tl.float32)
    for first in range(0, size, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        values = tl.load(x + row * x_row_stride + column * x_stride, mask=column < size, other=0.0).to(tl.float32)
        squares += values * values
    scale = tl.rsqrt(tl.sum(squares) / size + eps)
    for first in range(0, size, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        values = tl.load(x + row * x_row_stride + column * x_stride, mask=column < size, other=0.0).to(tl.float32)
        weights = tl.load(weight + column * weight_stride, mask=column < size, other=0.0).to(tl.float32)
        scaled = values * scale * weights
        tl.store(out + row * out_row_stride + column * out_stride, scaled.to(out.dtype.element_ty), mask=column < size)
