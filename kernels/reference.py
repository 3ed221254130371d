"""The reference kernels: plain torch, the definition of correct on every device. Not fast, and exact in one respect:

They are batch-invariant. The bits of a row depend on that row (and in attention on its sequence up to it) alone: not
on how many rows stand beside it, on its place among them, on where a prompt was cut into chunks, on the block size, or
on the number of threads. So a token does not change with batch-mates or with the node that computes it. This is how:

- Matrix products run on tiles of one fixed shape, so that the library below always takes the same path: ROWS rows times
  COLUMNS columns. They are given to it as a batch, of two at least: a product by itself is shared by the threads in
  ways that sum in another order for some rows (narrow remainders of columns; on Intel's CPUs pieces of a long sum).
- Attention multiplies tiles of ROWS queries and KEYS keys cut at absolute positions, takes the exact maximum over all,
  and adds the tiles up in order. A key that a row does not see adds an exact zero.
- Of functions that are not exactly rounded only exp, tanh and erf are used, which torch computes by the same code
  wherever an element stands. Its silu and sigmoid are not: the last elements of a tensor, or of a thread's share, take
  another.
- Products of bfloat16 rows with quantised weights are sums of whole numbers, exact ones, and of floats in one order.
- Sums and softmax are in float32. A row's sum is one thread's work, except for a single row wider than 32,768.

tests/conformance checks all of this on the machine at hand. Across kinds of CPU only closeness holds. Shapes: see base.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvrelay.kernels import sampling
from kvrelay.kernels.base import Activation, AttentionBatch, Draw, PackedWeight, QuantisedWeight

ROWS = 16
COLUMNS = 64
KEYS = 64
VALUE_COLUMNS = 16

SHARED = 32  # inputs of a row that are rounded by one power of two, where weights are quantised
NUMBER_BITS = 14
SMALLEST = 27  # exponent, as a float stores it: smaller groups are rounded as if they had it
_OUTPUTS = 1_024  # of a quantised weight, whose codes are floats for a moment
_INTEGER_ROWS = 32

_MAX_QUERIES = 128  # of one sequence in one piece of work: bounds the memory that scores take
_MAX_GATHERED_TOKENS = 16_384  # of all sequences in one piece of work


class ReferenceKernels:
    """Implements `base.Kernels` for any device."""

    name = "reference"
    row_multiple = ROWS

    def pack(self, weight_OC: Tensor) -> PackedWeight:
        num_outputs, num_inputs = weight_OC.shape
        padded = max(_round_up(num_outputs, COLUMNS), 2 * COLUMNS)
        weight_OC = pad(weight_OC, (0, 0, 0, padded - num_outputs)) if padded > num_outputs else weight_OC
        return PackedWeight(weight_OC.contiguous().view(-1, COLUMNS, num_inputs), num_outputs, num_inputs)

    def pack_quantised(self, weight: QuantisedWeight) -> PackedWeight:
        if weight.dtype == torch.bfloat16:
            num_outputs, num_inputs = weight.shape
            return PackedWeight(weight.codes, num_outputs, num_inputs, weight)
        return self.pack(weight.unpacked())

    def linear(self, x_TC: Tensor, weight: PackedWeight, bias_O: Tensor | None = None) -> Tensor:
        if isinstance(weight.form, QuantisedWeight):
            return integer_linear(x_TC, weight.form, bias_O)
        num_rows = x_TC.shape[0]
        x_TC = _pad_to_multiple(x_TC, ROWS).contiguous()
        tiles, num_tiles = weight.data.transpose(1, 2), weight.data.shape[0]
        out = x_TC.new_empty(x_TC.shape[0], num_tiles, COLUMNS)
        for start in range(0, num_rows, ROWS):
            rows = slice(start, start + ROWS)
            out[rows] = torch.bmm(x_TC[rows].expand(num_tiles, -1, -1), tiles).transpose(0, 1)
        out_TO = out.flatten(1)[:num_rows, : weight.num_outputs]
        return out_TO if bias_O is None else out_TO + bias_O

    def rms_norm(self, x_TC: Tensor, weight_C: Tensor, eps: float) -> Tensor:
        x = x_TC.float()
        mean_square = x.square().sum(-1, keepdim=True) / x.shape[-1]
        return (x * torch.rsqrt(mean_square + eps) * weight_C.float()).to(x_TC.dtype)

    def layer_norm(self, x_TC: Tensor, weight_C: Tensor | None, bias_C: Tensor | None, eps: float) -> Tensor:
        x = x_TC.float()
        x = x - x.sum(-1, keepdim=True) / x.shape[-1]
        x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) / x.shape[-1] + eps)
        if weight_C is not None:
            x = x * weight_C.float()
        if bias_C is not None:
            x = x + bias_C.float()
        return x.to(x_TC.dtype)

    def rotary(self, x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
        num_turned = 2 * cos_TR.shape[-1]
        first, second = x_THD[..., :num_turned].float().chunk(2, dim=-1)
        cos, sin = cos_TR[:, None], sin_TR[:, None]
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x_THD.dtype)
        return turned if num_turned == x_THD.shape[-1] else torch.cat([turned, x_THD[..., num_turned:]], dim=-1)

    def activate(self, x_TC: Tensor, activation: Activation, up_TC: Tensor | None = None) -> Tensor:
        out = _ACTIVATIONS[activation](x_TC.float())
        return (out if up_TC is None else out * up_TC.float()).to(x_TC.dtype)

    def reshape_and_cache(self, k_TKD: Tensor, v_TKD: Tensor, kv_N2KBD: Tensor, slot_mapping_T: Tensor) -> None:
        num_blocks, _, _, block_size, _ = kv_N2KBD.shape
        rows = (slot_mapping_T >= 0).nonzero().flatten()
        slots = slot_mapping_T[rows]
        if slots.numel() and int(slots.max()) >= num_blocks * block_size:
            raise ValueError(f"slot {int(slots.max())} lies outside a pool of {num_blocks} blocks of {block_size}")
        blocks, offsets = slots // block_size, slots % block_size
        kv_N2KBD[blocks, 0, :, offsets] = k_TKD[rows]
        kv_N2KBD[blocks, 1, :, offsets] = v_TKD[rows]

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
        out_THD = torch.zeros_like(q_THD)
        for piece in _pieces(batch.query_starts.tolist(), batch.seq_lens.tolist()):
            rows_SQ = torch.tensor(piece.rows)[:, None] + torch.arange(piece.num_queries)
            keys, values = _gather(kv_N2KBD, batch.block_tables, piece)
            q_SQHD = q_THD[rows_SQ].float() * scale
            out_THD[rows_SQ] = _attend(q_SQHD, keys, values, piece, window, softcap).to(q_THD.dtype)
        return out_THD

    def scan(self, logits_RV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        places = logits_RV.argmax(dim=-1)
        largest = logits_RV.gather(-1, places[:, None])[:, 0]
        # The extremes tell, in a tenth of the time of `isfinite` over all.
        return largest, places, logits_RV.amin(-1).isfinite() & logits_RV.amax(-1).isfinite()

    def draw(self, logits_RV: Tensor, draws: Sequence[Draw]) -> list[list[int]]:
        return [sampling.draw(sampling.distribution(logits_RV[draw.row], draw), draw.numbers) for draw in draws]

    def total_weights(self, logits_RV: Tensor) -> Tensor:
        return sampling.weigh(logits_RV - logits_RV.amax(-1, keepdim=True)).sum(-1)

    def likeliest(self, logits_RV: Tensor, count: int) -> Tensor:
        return sampling.likeliest(logits_RV, count)


def integer_linear(x_TC: Tensor, weight: QuantisedWeight, bias_O: Tensor | None = None) -> Tensor:
    """A product of bfloat16 rows with a quantised weight: exact in whole numbers within a group, then in float32.

    For each group S = sum of code * number and X = sum of numbers; sum += scale * (S * 2^k) + minimum * (X * 2^k), each
    operation rounded, in the groups' order. The bias is added before the sum is rounded to bfloat16.
    """
    num_outputs, num_inputs = weight.shape
    num_groups, size = weight.scales.shape[1], weight.group
    numbers_TC, powers_TS = whole_numbers(x_TC)
    numbers_TGC = numbers_TC[:, : num_groups * size].reshape(-1, num_groups, size)
    powers_TG = powers_TS.repeat_interleave(SHARED // size, dim=1)[:, :num_groups]
    totals_TG = numbers_TGC.sum(-1) * powers_TG
    # Two digits of 8 bits: so no sum leaves float32's whole numbers, in any order, and no product TensorFloat-32's.
    high_TGC = (numbers_TGC / 256).round()
    digits_GTC = torch.stack([high_TGC, numbers_TGC - 256 * high_TGC]).permute(2, 0, 1, 3)
    out_TO = x_TC.new_empty(len(x_TC), num_outputs)
    for first in range(0, num_outputs, _OUTPUTS):
        outputs = slice(first, first + _OUTPUTS)
        codes_OC = pad(weight.codes[outputs].float(), (0, num_groups * size - num_inputs))
        codes_GCO = codes_OC.view(-1, num_groups, size).permute(1, 2, 0)
        scales_G1O = weight.scales[outputs].float().t()[:, None]
        minimums_G1O = None if weight.minimums is None else weight.minimums[outputs].float().t()[:, None]
        for start in range(0, len(x_TC), _INTEGER_ROWS):
            rows = slice(start, start + _INTEGER_ROWS)
            high_GTO, low_GTO = torch.bmm(digits_GTC[:, :, rows].flatten(1, 2), codes_GCO).int().chunk(2, dim=1)
            exact_GTO = high_GTO.mul_(256).add_(low_GTO).float()
            parts_GTO = exact_GTO.mul_(powers_TG[rows].t()[..., None]).mul_(scales_G1O)
            if minimums_G1O is not None:
                parts_GTO += minimums_G1O * totals_TG[rows].t()[..., None]
            sums_TO = torch.zeros_like(parts_GTO[0])
            for part_TO in parts_GTO:
                sums_TO += part_TO
            if bias_O is not None:
                sums_TO += bias_O[outputs].float()
            out_TO[rows, outputs] = sums_TO.to(x_TC.dtype)
    return out_TO


def whole_numbers(x_TC: Tensor) -> tuple[Tensor, Tensor]:
    """Rows as whole numbers below 2^14 times a power of two, which SHARED inputs share. [T, C filled up], [T, S].

    The largest of a group has 14 bits, so a bfloat16 within 2^-6 of it loses nothing. Where a group holds an infinity
    or a NaN its power is NaN, and so are all outputs of its row.
    """
    groups_TSC = _pad_inputs(x_TC.float()).contiguous().view(len(x_TC), -1, SHARED)
    most_TS = groups_TSC.view(torch.int32).bitwise_and(0x7FFFFFFF).amax(-1)  # the order of sizes is that of their bits
    exponents_TS = (most_TS >> 23).clamp_min(SMALLEST)  # as a float stores them: by 127 too large
    up_TS = ((2 * 127 + NUMBER_BITS - 1 - exponents_TS) << 23).view(torch.float32)
    powers_TS = ((exponents_TS + 1 - NUMBER_BITS) << 23).view(torch.float32)
    finite_TS = exponents_TS < 255
    numbers_TSC = torch.where(finite_TS[..., None], groups_TSC * up_TS[..., None], 0.0).round()
    return numbers_TSC.flatten(1), torch.where(finite_TS, powers_TS, torch.nan)


def _pad_inputs(x_TC: Tensor) -> Tensor:
    return pad(x_TC, (0, -x_TC.shape[1] % SHARED)).contiguous()


def _silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def _gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x * math.sqrt(0.5)))


def _gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x))))


def _relu2(x: Tensor) -> Tensor:
    return torch.relu(x).square()


_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu2": _relu2,
}


@dataclass(frozen=True, slots=True)
class _Piece:
    """Attention computed in one go: the same number of consecutive queries of each of some sequences."""

    sequences: list[int]
    rows: list[int]  # of each one's first query
    ends: list[int]  # position after each one's last query: how many keys it needs
    num_queries: int


def _pieces(query_starts: list[int], seq_lens: list[int]) -> Iterator[_Piece]:
    """Long queries alone and cut; sequences with a single query together, like lengths with like."""
    single: list[int] = []
    for s, seq_len in enumerate(seq_lens):
        start, end = query_starts[s], query_starts[s + 1]
        if end - start == 1:
            single.append(s)
            continue
        for row in range(start, end, _MAX_QUERIES):
            num_queries = min(_MAX_QUERIES, end - row)
            yield _Piece([s], [row], [seq_len - (end - row) + num_queries], num_queries)
    single.sort(key=seq_lens.__getitem__, reverse=True)
    while single:
        longest = seq_lens[single[0]]
        room = max(1, _MAX_GATHERED_TOKENS // longest)
        group = [s for s in single[:room] if seq_lens[s] > longest // 2 or seq_lens[s] <= KEYS >= longest]
        single = single[len(group) :]
        yield _Piece(group, [query_starts[s] for s in group], [seq_lens[s] for s in group], 1)


def _gather(kv_N2KBD: Tensor, block_tables_SM: Tensor, piece: _Piece) -> tuple[Tensor, Tensor]:
    """A piece's keys [S*K, L, D] and values [S*K, L, V] in float32, L a multiple of KEYS, V >= D + 1 of VALUE_COLUMNS.

    Value column D is one, so that a product with the values also sums the weights. Values beyond a sequence's end are
    zero whatever the pool holds there, for a weight of zero does not silence a NaN; keys there are hidden later.
    """
    _, _, num_kv_heads, block_size, head_dim = kv_N2KBD.shape
    num_sequences, num_blocks = len(piece.sequences), -(-max(piece.ends) // block_size)
    num_keys = num_blocks * block_size
    used = torch.tensor([-(-end // block_size) for end in piece.ends])[:, None] > torch.arange(num_blocks)
    tables = block_tables_SM[piece.sequences, :num_blocks].where(used.to(block_tables_SM.device), 0)
    gathered = kv_N2KBD[tables]  # [S, M, 2, K, B, D]
    shape = (num_sequences, num_kv_heads, _round_up(num_keys, KEYS))
    keys = gathered.new_empty((*shape, head_dim), dtype=torch.float32)
    values = gathered.new_empty((*shape, _round_up(head_dim + 1, VALUE_COLUMNS)), dtype=torch.float32)
    in_blocks = (num_blocks, block_size)
    torch.unflatten(keys[:, :, :num_keys], 2, in_blocks).copy_(gathered[:, :, 0].transpose(1, 2))
    torch.unflatten(values[:, :, :num_keys, :head_dim], 2, in_blocks).copy_(gathered[:, :, 1].transpose(1, 2))
    values[..., head_dim] = 1
    values[..., head_dim + 1 :] = 0
    for s, end in enumerate(piece.ends):
        values[s, :, end:] = 0
    return keys.flatten(0, 1), values.flatten(0, 1)


def _attend(q_SQHD: Tensor, keys: Tensor, values: Tensor, piece: _Piece, window: int, softcap: float) -> Tensor:
    """Attention of scaled queries over what `_gather` gave. Returns [S, Q, H, D] in float32."""
    num_sequences, num_queries, num_heads, head_dim = q_SQHD.shape
    num_problems, num_keys, _ = keys.shape
    num_kv_heads = num_problems // num_sequences
    group = num_heads // num_kv_heads

    # The rows of one KV head are its queries, each with the heads that share the KV head, cut into tiles of ROWS.
    q = torch.unflatten(q_SQHD, 2, (num_kv_heads, group)).transpose(1, 2).reshape(num_problems, -1, head_dim)
    q = torch.unflatten(pad(q, (0, 0, 0, -q.shape[1] % ROWS)), 1, (-1, ROWS))  # [S*K, tiles, ROWS, D]
    positions = torch.tensor(piece.ends)[:, None] + torch.arange(-num_queries, 0)
    positions = positions.repeat_interleave(group, dim=1)
    positions = torch.unflatten(pad(positions, (0, -positions.shape[1] % ROWS)), 1, (-1, ROWS))  # [S, tiles, ROWS]
    positions = positions.to(q.device)

    key_tiles = torch.unflatten(keys, 1, (-1, KEYS)).unbind(1)
    value_tiles = torch.unflatten(values, 1, (-1, KEYS)).unbind(1)
    # [key tiles, S*K, tiles, ROWS, KEYS]
    scores = torch.stack([_product(q, tile.transpose(1, 2)) for tile in key_tiles])
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    key_positions = torch.arange(num_keys, device=q.device).view(-1, 1, 1, 1, 1, KEYS)
    hidden = key_positions > positions[:, None, :, :, None]
    if window:
        hidden |= key_positions <= positions[:, None, :, :, None] - window
    torch.unflatten(scores, 1, (num_sequences, num_kv_heads)).masked_fill_(hidden, -torch.inf)
    weights = (scores - scores.amax(dim=(0, -1), keepdim=True)).exp_()

    out = weights.new_zeros(*q.shape[:-1], values.shape[-1])
    for tile_weights, tile in zip(weights, value_tiles, strict=True):
        out += _product(tile_weights, tile)
    out = out[..., :head_dim] / out[..., head_dim : head_dim + 1]
    out = out.flatten(1, 2)[:, : num_queries * group]
    return out.reshape(num_sequences, num_kv_heads, num_queries, group, head_dim).transpose(1, 2).flatten(2, 3)


def _product(tiles: Tensor, matrices: Tensor) -> Tensor:
    """[P, tiles, ROWS, X] times [P, X, Y], every product of ROWS rows on its own."""
    if tiles.shape[1] == 1:
        return torch.bmm(tiles[:, 0], matrices)[:, None]
    num_tiles = tiles.shape[1]
    return torch.stack(
        [torch.bmm(rows, matrix.expand(num_tiles, -1, -1)) for rows, matrix in zip(tiles, matrices, strict=True)]
    )


def _pad_to_multiple(x: Tensor, multiple: int) -> Tensor:
    missing = -x.shape[0] % multiple
    return pad(x, (0, 0, 0, missing)) if missing else x


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
