"""In which form KV travels between two nodes whose pools differ, and which differences it bridges. Pure.

What travels is always D's blocks, in D's block size: P lays the tokens of its own blocks out anew. The elements travel
in the narrower of the two pools' dtypes, or in the one that `kv_transfer_dtype` names; where that is not D's own, each
block comes in the beginning of the D block that it is for, and D widens it there once all is in. int8 and fp8 (e4m3)
carry one float32 scale for each token, head, layer, keys and values apart: behind the elements, in the same order.
"""

from dataclasses import dataclass, fields

from kvrelay.engine.errors import LayoutMismatch, PreconditionFailed
from kvrelay.engine.kv_layout import DTYPE_BYTES, KVLayout

MAX_BLOCK_BYTES = 2**26  # of one of D's blocks, where it has to be made on P: what a peer can make P set aside
SCALE_BYTES = 4
TRANSIT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "fp8": 1}  # an element
SCALED = frozenset({"int8", "fp8"})
_CASTS = frozenset({"float32", "bfloat16"})  # pools between which elements are converted


@dataclass(frozen=True, slots=True)
class Transit:
    """How KV of one session travels from `source` (P's layout) to `target` (D's), in elements of `dtype`."""

    source: KVLayout
    target: KVLayout
    dtype: str

    @property
    def is_direct(self) -> bool:
        """P's blocks are D's blocks: bytes are copied as they lie."""
        return self.source == self.target and not self.is_widened

    def describe(self) -> dict[str, object]:
        """For a log line."""
        return {
            "block_sizes": f"{self.source.block_size} -> {self.target.block_size}",
            "dtypes": f"{self.source.dtype} -> {self.dtype} -> {self.target.dtype}",
        }

    @property
    def is_widened(self) -> bool:
        """Whether D has still to make its own elements of what has come."""
        return self.dtype != self.target.dtype

    @property
    def num_elements(self) -> int:
        """Of one of D's blocks."""
        return self.target.block_bytes // DTYPE_BYTES[self.target.dtype]

    @property
    def block_bytes(self) -> int:
        """Of one of D's blocks, as it travels."""
        scales = self.num_elements // self.target.head_dim * SCALE_BYTES if self.dtype in SCALED else 0
        return self.num_elements * TRANSIT_BYTES[self.dtype] + scales


def agree_transit(p: KVLayout, d: KVLayout, p_dtype: str = "auto", d_dtype: str = "auto") -> Transit:
    """The form that both sides come to by themselves. `p_dtype`, `d_dtype`: what `kv_transfer_dtype` says on each.

    Raises: LayoutMismatch, PreconditionFailed; the field is named.
    """
    for name in (field.name for field in fields(KVLayout)):
        values = (getattr(p, name), getattr(d, name))
        if values[0] != values[1] and not (name == "block_size" or (name == "dtype" and _CASTS.issuperset(values))):
            raise LayoutMismatch(name, *values)
    wishes = {p_dtype, d_dtype} - {"auto"}
    if len(wishes) > 1:
        raise PreconditionFailed(
            f"kv_transfer_dtype differs: {p_dtype!r} on the prefill node, {d_dtype!r} on the decode node"
        )
    narrower = min((p.dtype, d.dtype), key=lambda dtype: DTYPE_BYTES.get(dtype, 0))
    transit = Transit(p, d, wishes.pop() if wishes else narrower)
    if not transit.is_direct:
        _check_convertible(transit)
    return transit


def _check_convertible(transit: Transit) -> None:
    pools = {transit.source.dtype, transit.target.dtype}
    if transit.dtype not in TRANSIT_BYTES:
        raise PreconditionFailed(f"kv_transfer_dtype = {transit.dtype!r}: not known here")
    if not (pools <= _CASTS or pools == {transit.dtype}):
        raise PreconditionFailed(
            f"kv_transfer_dtype = {transit.dtype!r}: does not go with dtype {transit.source.dtype!r}"
        )
    if transit.source.block_size < 1 or transit.target.block_size < 1:
        raise LayoutMismatch("block_size", transit.source.block_size, transit.target.block_size)
    if transit.target.block_bytes > MAX_BLOCK_BYTES:
        raise PreconditionFailed(
            f"block_size = {transit.target.block_size}: {transit.target.block_bytes} bytes a block, and no more than "
            f"{MAX_BLOCK_BYTES} can be converted"
        )
    if transit.block_bytes > transit.target.block_bytes:
        raise PreconditionFailed(
            f"kv_transfer_dtype = {transit.dtype!r}: a block of {transit.block_bytes} bytes does not fit in the decode "
            f"node's, {transit.target.block_bytes}"
        )
