"""The parts of a decoder layer that know nothing of attention: projections, norms, the MLP.

Each takes its weights from the checkpoint when it is made, by the names they have there.
"""

from collections.abc import Sequence as Seq
from itertools import accumulate

from torch import Tensor

from kvrelay.engine.models.loader import Checkpoint, Matrix
from kvrelay.engine.models.options import DecoderConfig, NormConfig
from kvrelay.kernels.base import Kernels, QuantisedWeight


class Projection:
    """A matrix product with a weight, and a bias where there is one."""

    def __init__(self, kernels: Kernels, weight_OC: Matrix, bias_O: Tensor | None) -> None:
        self._kernels = kernels
        if isinstance(weight_OC, QuantisedWeight):
            self.weight = kernels.pack_quantised(weight_OC)
        else:
            self.weight = kernels.pack(weight_OC)
        self.bias = bias_O

    def __call__(self, x_TC: Tensor) -> Tensor:
        return self._kernels.linear(x_TC, self.weight, self.bias)


def take_matrices(
    checkpoint: Checkpoint, path: str, names: Seq[str], sizes: Seq[int], num_inputs: int, bias: bool
) -> list[tuple[Matrix, Tensor | None]]:
    """The weights and biases of matrices with so many outputs each: one name for each, or one for all of them, whose
    rows then lie one after the other."""
    if len(names) == len(sizes):
        return [
            _take_matrix(checkpoint, f"{path}.{n}", size, num_inputs, bias)
            for n, size in zip(names, sizes, strict=True)
        ]
    (name,) = names
    weight, biases = _take_matrix(checkpoint, f"{path}.{name}", sum(sizes), num_inputs, bias)
    rows = [slice(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True)]
    return [(weight[piece], None if biases is None else biases[piece]) for piece in rows]


def _take_matrix(
    checkpoint: Checkpoint, name: str, num_outputs: int, num_inputs: int, bias: bool
) -> tuple[Matrix, Tensor | None]:
    weight = checkpoint.take_matrix(f"{name}.weight", num_outputs, num_inputs)
    return weight, checkpoint.take(f"{name}.bias", num_outputs) if bias else None


class Norm:
    """RMSNorm or LayerNorm over rows of `size` elements."""

    def __init__(self, kernels: Kernels, checkpoint: Checkpoint, name: str, config: NormConfig, size: int) -> None:
        self.size = size
        self._kernels = kernels
        self.config = config
        self.weight = checkpoint.take(f"{name}.weight", size) if config.weight else None
        self.bias = checkpoint.take(f"{name}.bias", size) if config.bias else None
        if self.weight is not None and config.weight_offset:
            self.weight = self.weight.float() + config.weight_offset

    def __call__(self, x_TC: Tensor) -> Tensor:
        if self.config.kind == "layer":
            return self._kernels.layer_norm(x_TC, self.weight, self.bias, self.config.eps)
        assert self.weight is not None
        return self._kernels.rms_norm(x_TC, self.weight, self.config.eps)


def make_norm(kernels: Kernels, checkpoint: Checkpoint, path: str, name: str, config: DecoderConfig) -> Norm | None:
    """A norm over hidden states; without a name, none."""
    return Norm(kernels, checkpoint, f"{path}.{name}", config.norm, config.hidden_size) if name else None


class Mlp:
    """down(activation(gate(x)) * up(x)), or without a gate down(activation(up(x)))."""

    def __init__(self, config: DecoderConfig, kernels: Kernels, checkpoint: Checkpoint, path: str) -> None:
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        sizes = (inner, inner) if config.gated else (inner,)
        inputs = take_matrices(checkpoint, path, config.names.mlp_inputs, sizes, hidden, bias)
        outputs = take_matrices(checkpoint, path, (config.names.mlp_output,), (hidden,), inner, bias)
        self._kernels = kernels
        self.activation = config.activation
        self.inputs = [Projection(kernels, *matrix) for matrix in inputs]
        self.down = Projection(kernels, *outputs[0])

    def __call__(self, x_TC: Tensor) -> Tensor:
        return self.down(
            self._kernels.activate(self.inputs[0](x_TC), self.activation, *[up(x_TC) for up in self.inputs[1:]])
        )
