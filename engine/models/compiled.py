"""A decoder as one program of the compiled kernels: what `decoder.py` does, in as few passes over memory as it takes.

The operations of all layers are listed once, over buffers that every step uses again; a step is one call, from token
ids to the logits of the rows that sample. Products are written where they belong: added to the residual stream, or
gated and activated, without a pass of their own.

    x ─ norm ─ [q k v] ─ rotate, cache ─ attention ─ product, added to x ─ norm ─ product, gated ─ product, added to x

Shapes: see decoder.
"""

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from kvrelay.engine.batch import ForwardBatch
from kvrelay.engine.models.decoder import Decoder, Layer
from kvrelay.engine.models.layers import Norm, Projection
from kvrelay.engine.models.rope import Rope
from kvrelay.kernels.cpu import native
from kvrelay.kernels.cpu.kernels import CpuKernels, address, as_float, describe, describe_pool
from kvrelay.kernels.cpu.machine import Machine, program
from kvrelay.kernels.cpu.native import Batch, Details, Pointwise, make_op

_LEAST_ROWS = 16


class CompiledDecoder:
    """Implements `base.Model` for a decoder whose weights were packed by the compiled kernels."""

    def __init__(self, decoder: Decoder, kernels: CpuKernels) -> None:
        self.num_layers = decoder.num_layers
        self.num_kv_heads = decoder.num_kv_heads
        self.head_dim = decoder.head_dim
        self.vocab_size = decoder.vocab_size
        self._decoder = decoder
        self._machine = kernels.machine
        self._told = Batch()  # of the step; its pool is described once
        self._pool: Tensor | None = None
        self.reserve(_LEAST_ROWS, _LEAST_ROWS)

    def reserve(self, num_rows: int, num_sampled: int) -> None:
        """Make room for steps of so many rows, of which so many sample. Memory is taken as rows are used; a step that
        needs more room than there is makes it, which takes milliseconds."""
        self._trunk = _Trunk(self._decoder, self._machine, num_rows)
        self._make_head(num_sampled)

    def _make_head(self, num_rows: int) -> None:
        self._head = _Head(self._decoder, self._machine, num_rows)
        self._program = program([*self._trunk.ops, self._head.pick(self._trunk.hidden), *self._head.ops])

    def forward(self, batch: ForwardBatch, pool_NL2KBD: Tensor) -> Tensor:
        """Hidden states [T, C] of the batch's tokens, whose keys and values are written into the pool. They are
        overwritten by the next call."""
        self._run(batch, pool_NL2KBD, num_sampled=0)
        return self._trunk.states[: batch.num_rows]

    def run(self, batch: ForwardBatch, pool_NL2KBD: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states, the batch's first, and the logits [R, V] of the rows that sample, likewise overwritten."""
        self._run(batch, pool_NL2KBD, batch.num_sampled)
        return self._trunk.states, self._head.first_logits[batch.num_sampled]

    def logits(self, hidden_RC: Tensor) -> Tensor:
        """[R, V] in float32, of some rows of `forward`'s hidden states. They are overwritten by the next call."""
        num_rows = len(hidden_RC)
        if self._head.max_rows < num_rows:
            self._make_head(_room_for(num_rows))
        self._head.hidden[:num_rows, : hidden_RC.shape[1]] = hidden_RC
        self._machine.run(self._head.program, Batch(num_rows=num_rows))
        return self._head.first_logits[num_rows]

    def _run(self, batch: ForwardBatch, pool_NL2KBD: Tensor, num_sampled: int) -> None:
        num_rows = batch.num_rows
        if self._trunk.max_rows < num_rows:
            self.reserve(_room_for(num_rows), self._head.max_rows)
        if self._head.max_rows < num_sampled:
            self._make_head(_room_for(num_sampled))
        told = self._told
        if pool_NL2KBD is not self._pool:
            told.pool = describe_pool(pool_NL2KBD[:, 0], layer_stride=pool_NL2KBD.stride(1))
            self._pool = pool_NL2KBD
        told.num_rows, told.num_sequences, told.num_picked = num_rows, batch.num_sequences, num_sampled
        told.table_width = batch.table_width
        (
            told.token_ids,
            told.positions,
            told.slots,
            told.query_starts,
            told.seq_lens,
            told.picked,
            _,
            told.block_tables,
        ) = batch.addresses()
        self._machine.run(self._program, told)


class _Operations:
    """A program in the making, and the memory it works on."""

    def __init__(self, decoder: Decoder, machine: Machine, max_rows: int) -> None:
        self.max_rows = max_rows
        self.dtype = decoder.embedding.dtype
        self._machine = machine
        self._kept: list[object] = [decoder]  # what the operations point to
        self.ops: list[native.Op] = []

    def buffer(self, size: int) -> Tensor:
        """Zeroed rows of so many elements, each as long as a product's input has to be."""
        rows = torch.zeros(self.max_rows, self._machine.row_stride(self.dtype, size), dtype=self.dtype)
        self._kept.append(rows)
        return rows

    def keep_float(self, x: Tensor | None) -> int | None:
        """Where a vector lies as floats, for as long as the program lives."""
        x = as_float(x)
        self._kept.append(x)
        return address(x)

    def add(self, details: Details) -> None:
        self.ops.append(make_op(self.dtype, details))

    def norm(self, norm: Norm, x: Tensor, out: Tensor, num_groups: int = 1) -> None:
        self.add(
            native.Norm(
                x=x.data_ptr(),
                out=out.data_ptr(),
                weight=self.keep_float(norm.weight),
                bias=self.keep_float(norm.bias),
                x_stride=x.stride(0),
                out_stride=out.stride(0),
                num_groups=num_groups,
                size=norm.size,
                is_layer_norm=norm.config.kind == "layer",
                eps=norm.config.eps,
            )
        )

    def product(
        self,
        x: Tensor,
        projections: Seq[Projection],
        out: Tensor,
        epilogue: int = native.STORE,
        *,
        activation: int = native.ACTIVATIONS[None],
        scale: float = 1.0,
    ) -> None:
        """Products of x with several weights, side by side in `out`; gated, there is one output of two weights."""
        linear = native.Linear(
            x=x.data_ptr(),
            out=out.data_ptr(),
            x_stride=x.stride(0),
            out_stride=out.stride(0),
            num_weights=len(projections),
            epilogue=epilogue,
            activation=activation,
            scale=scale,
        )
        column = 0
        for i, projection in enumerate(projections):
            linear.columns[i] = column
            linear.weights[i] = describe(projection.weight)
            linear.biases[i] = self.keep_float(projection.bias)
            column += projection.weight.num_outputs
        self.add(linear)

    def pointwise(self, x: Tensor, out: Tensor, size: int, kind: int, scale: float = 1.0) -> None:
        self.add(
            Pointwise(
                x=x.data_ptr(),
                out=out.data_ptr(),
                x_stride=x.stride(0),
                out_stride=out.stride(0),
                size=size,
                kind=kind,
                scale=scale,
            )
        )


class _Trunk(_Operations):
    """From token ids to hidden states."""

    def __init__(self, decoder: Decoder, machine: Machine, max_rows: int) -> None:
        super().__init__(decoder, machine, max_rows)
        self._config = config = decoder.config
        self._query_size, self._kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.hidden = self.buffer(config.hidden_size)
        self.states = self.hidden[:, : config.hidden_size]  # without the zeros at the rows' ends
        self._normed = self.buffer(config.hidden_size)
        self._qkv = self.buffer(self._query_size + 2 * self._kv_size)
        self._attended = self.buffer(self._query_size)
        self._inner = self.buffer(config.intermediate_size)
        self._delta = self.buffer(config.hidden_size)
        self.add(
            native.Embed(
                table=decoder.embedding.data_ptr(),
                out=self.hidden.data_ptr(),
                size=config.hidden_size,
                out_stride=self.hidden.stride(0),
                scale=decoder.embedding_scale,
            )
        )
        self._turns = [self._make_turns(rope) for rope in decoder.ropes]
        for i, layer in enumerate(decoder.layers):
            self._layer(i, layer)

    def _make_turns(self, rope: Rope) -> tuple[Tensor, Tensor]:
        num_pairs = len(rope.frequencies)
        cosines, sines = torch.zeros(2, self.max_rows, num_pairs)
        self._kept += [cosines, sines]
        self.add(
            native.Turns(
                frequencies=self.keep_float(rope.frequencies),
                cosines=cosines.data_ptr(),
                sines=sines.data_ptr(),
                num_pairs=num_pairs,
                magnitude=rope.magnitude,
            )
        )
        return cosines, sines

    def _layer(self, index: int, layer: Layer) -> None:
        normed = self._norm_hidden(layer.attention_norm, keeps=self._config.parallel)
        self._attention(index, layer, normed)
        self._add_product(self._attended, layer.attention.output, layer.attention_output_norm)
        if not self._config.parallel:
            normed = self._norm_hidden(layer.mlp_norm)
        mlp = layer.mlp
        gates = len(mlp.inputs) == 2
        self.product(
            normed,
            mlp.inputs,
            self._inner,
            native.GATE if gates else native.STORE,
            activation=native.ACTIVATIONS[mlp.activation],
        )
        self._add_product(self._inner, mlp.down, layer.mlp_output_norm)

    def _norm_hidden(self, norm: Norm | None, *, keeps: bool = False) -> Tensor:
        """The input of attention or MLP. `keeps`: it is still needed when the hidden states have changed."""
        if norm is not None:
            self.norm(norm, self.hidden, self._normed)
        elif keeps:
            self.pointwise(self.hidden, self._normed, self._config.hidden_size, native.ACTIVATE)
        else:
            return self.hidden
        return self._normed

    def _attention(self, index: int, layer: Layer, normed: Tensor) -> None:
        config, attention = self._config, layer.attention
        self.product(normed, (attention.q, attention.k, attention.v), self._qkv)
        queries = self._qkv
        keys = self._qkv[:, self._query_size :]
        values = keys[:, self._kv_size :]
        if config.clip_qkv:
            size = self._query_size + 2 * self._kv_size
            self.pointwise(self._qkv, self._qkv, size, native.CLIP, config.clip_qkv)
        for norm, x, size in ((attention.q_norm, queries, self._query_size), (attention.k_norm, keys, self._kv_size)):
            if norm is not None:
                self.norm(norm, x, x, num_groups=size // norm.size)
        self.add(
            native.RotateAndCache(
                queries=self._rotation(attention.rope, queries, config.num_heads),
                keys=self._rotation(attention.rope, keys, config.num_kv_heads),
                cache=native.Cache(
                    keys=keys.data_ptr(),
                    values=values.data_ptr(),
                    key_stride=keys.stride(0),
                    value_stride=values.stride(0),
                    num_kv_heads=config.num_kv_heads,
                    head_dim=config.head_dim,
                    layer=index,
                ),
                caches=1,
            )
        )
        self.add(
            native.Attention(
                queries=queries.data_ptr(),
                out=self._attended.data_ptr(),
                query_stride=queries.stride(0),
                out_stride=self._attended.stride(0),
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                layer=index,
                window=attention.window,
                scale=config.scale,
                softcap=config.attention_softcap,
            )
        )

    def _rotation(self, rope: int | None, x: Tensor, num_heads: int) -> native.Rotate:
        if rope is None:
            return native.Rotate()  # of no heads
        cosines, sines = self._turns[rope]
        return native.Rotate(
            x=x.data_ptr(),
            stride=x.stride(0),
            num_heads=num_heads,
            head_dim=self._config.head_dim,
            num_pairs=cosines.shape[1],
            cosines=cosines.data_ptr(),
            sines=sines.data_ptr(),
        )

    def _add_product(self, x: Tensor, projection: Projection, norm: Norm | None) -> None:
        """To the hidden states, through a norm where there is one."""
        scale = self._config.residual_scale
        if norm is None:
            self.product(x, (projection,), self.hidden, native.ADD, scale=scale)
            return
        self.product(x, (projection,), self._delta)
        self.norm(norm, self._delta, self._delta)
        self.pointwise(self._delta, self.hidden, self._config.hidden_size, native.ADD_SCALED, scale)


class _Head(_Operations):
    """From hidden states to logits."""

    def __init__(self, decoder: Decoder, machine: Machine, max_rows: int) -> None:
        super().__init__(decoder, machine, max_rows)
        config = decoder.config
        self.hidden = self.buffer(config.hidden_size)
        normed = self.buffer(config.hidden_size)
        logits = torch.empty(max_rows, config.vocab_size)  # what no step uses takes no memory
        self.first_logits = [logits[:num_rows] for num_rows in range(max_rows + 1)]  # a slice takes 10 us in a step
        self.norm(decoder.norm, self.hidden, normed)
        self.product(normed, (decoder.head,), logits, native.STORE_FLOAT, scale=config.logit_scale)
        if config.logit_softcap:
            self.dtype = torch.float32
            self.pointwise(logits, logits, config.vocab_size, native.SOFT_CAP, config.logit_softcap)
        self.program = program(self.ops)  # by itself: for rows that are put into `hidden`

    def pick(self, hidden: Tensor) -> native.Op:
        """Takes the rows that sample from the trunk's hidden states."""
        size = hidden.stride(0)
        pick = native.Pick(table=hidden.data_ptr(), out=self.hidden.data_ptr(), size=size, out_stride=size, scale=1.0)
        return make_op(hidden.dtype, pick)


def _room_for(num_rows: int) -> int:
    """The next power of two: a program is made anew a few times, and then no more."""
    return max(_LEAST_ROWS, 1 << (num_rows - 1).bit_length())
