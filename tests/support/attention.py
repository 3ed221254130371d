"""Sequences to attend over: their queries, keys and values, the pool they lie in, and what the formula makes of them.

Shapes: H heads, K KV heads, D head dim, N blocks, B block size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvrelay.kernels.base import AttentionBatch, Kernels


@dataclass(frozen=True)
class Shape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    window: int = 0
    softcap: float = 0.0
    dtype: torch.dtype = torch.float32

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


@dataclass
class Texts:
    """Queries, keys and values of some sequences, and a pool in which the keys and values lie scattered."""

    shape: Shape
    queries: list[Tensor]
    keys: list[Tensor]
    values: list[Tensor]
    pool: Tensor
    block_tables: list[list[int]]

    @classmethod
    def random(cls, shape: Shape, lengths: list[int]) -> "Texts":
        def draw(heads: int) -> list[Tensor]:
            return [torch.randn(length, heads, shape.head_dim).to(shape.dtype) for length in lengths]

        queries, keys, values = draw(shape.num_heads), draw(shape.num_kv_heads), draw(shape.num_kv_heads)
        return cls.scattered(shape, queries, keys, values)

    @classmethod
    def scattered(cls, shape: Shape, queries: list[Tensor], keys: list[Tensor], values: list[Tensor]) -> "Texts":
        """Everything the sequences do not use is NaN."""
        counts = [-(-len(k) // shape.block_size) for k in keys]
        num_blocks = sum(counts) + 3
        free = torch.randperm(num_blocks).tolist()
        pool = torch.full(
            (num_blocks, 3, 2, shape.num_kv_heads, shape.block_size, shape.head_dim), torch.nan, dtype=shape.dtype
        )
        tables = []
        for count, k, v in zip(counts, keys, values, strict=True):
            table = [free.pop() for _ in range(count)]
            positions = torch.arange(len(k))
            blocks, offsets = torch.tensor(table)[positions // shape.block_size], positions % shape.block_size
            pool[blocks, 1, 0, :, offsets], pool[blocks, 1, 1, :, offsets] = k, v
            tables.append(table)
        return cls(shape, queries, keys, values, pool, tables)

    def attend(self, kernels: Kernels, ranges: list[tuple[int, int, int]], num_padding: int = 0) -> list[Tensor]:
        """Run positions [start, end) of sequence s for each (s, start, end), in one call; one output for each.

        Block tables hold nonsense beyond what the sequence has at `end`; queries are columns of something wider.
        """
        counts = [-(-end // self.shape.block_size) for _, _, end in ranges]
        tables = torch.tensor([-1, 2**40, 0, -(2**40)]).repeat(len(ranges), 1 + max(counts) // 4)
        for row, (s, _, _), count in zip(tables, ranges, counts, strict=True):
            row[:count] = torch.tensor(self.block_tables[s][:count])
        counts = [end - start for _, start, end in ranges]
        starts = torch.tensor([0, *counts]).cumsum(0)
        batch = AttentionBatch(starts, torch.tensor([end for _, _, end in ranges]), tables)
        q = torch.cat([self.queries[s][start:end] for s, start, end in ranges])
        wider = torch.full((len(q) + num_padding, q.shape[1] + 2, q.shape[2]), torch.nan, dtype=q.dtype)
        wider[: len(q), 1:-1] = q
        q, shape = wider[:, 1:-1], self.shape
        out = kernels.paged_attention(
            q, self.pool[:, 1], batch, scale=shape.scale, window=shape.window, softcap=shape.softcap
        )
        assert not out[sum(counts) :].any()
        return list(out[: sum(counts)].split(counts))

    def expected(self, s: int, start: int = 0, end: int | None = None) -> Tensor:
        """The formula, for positions [start, end) of sequence s (all of them), in float64."""
        shape, length = self.shape, len(self.keys[s]) if end is None else end
        group = shape.num_heads // shape.num_kv_heads
        k, v = (x[:length].double().repeat_interleave(group, dim=1) for x in (self.keys[s], self.values[s]))
        scores = torch.einsum("qhd,khd->hqk", self.queries[s][start:length].double(), k) * shape.scale
        if shape.softcap:
            scores = shape.softcap * torch.tanh(scores / shape.softcap)
        distance = torch.arange(start, length)[:, None] - torch.arange(length)
        hidden = (distance < 0) | ((distance >= shape.window) if shape.window else torch.tensor(False))
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
