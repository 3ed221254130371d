"""The parts of a decoder layer that know nothing of attention: a projection, a norm, the gated MLP.

Each takes its weights from the checkpoint when it is made, by the names they have there.
"""

from torch import Tensor

from kvrelay.engine.models.config import DecoderConfig
from kvrelay.engine.models.loader import Checkpoint
from kvrelay.kernels.base import Kernels


class Projection:
    """A matrix product with a weight, and a bias where the checkpoint has one."""

    def __init__(
        self, kernels: Kernels, checkpoint: Checkpoint, name: str, num_inputs: int, num_outputs: int, bias: bool = False
    ) -> None:
        self._kernels = kernels
        self._weight = kernels.pack(checkpoint.take(f"{name}.weight", num_outputs, num_inputs))
        self._bias = checkpoint.take(f"{name}.bias", num_outputs) if bias else None

    def __call__(self, x_TC: Tensor) -> Tensor:
        return self._kernels.linear(x_TC, self._weight, self._bias)


class Norm:
    """RMSNorm."""

    def __init__(self, kernels: Kernels, checkpoint: Checkpoint, name: str, size: int, eps: float) -> None:
        self._kernels = kernels
        self._weight = checkpoint.take(f"{name}.weight", size)
        self._eps = eps

    def __call__(self, x_TC: Tensor) -> Tensor:
        return self._kernels.rms_norm(x_TC, self._weight, self._eps)


class GatedMlp:
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: DecoderConfig, kernels: Kernels, checkpoint: Checkpoint, name: str) -> None:
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self._kernels = kernels
        self._gate = Projection(kernels, checkpoint, f"{name}.gate_proj", hidden, inner, bias)
        self._up = Projection(kernels, checkpoint, f"{name}.up_proj", hidden, inner, bias)
        self._down = Projection(kernels, checkpoint, f"{name}.down_proj", inner, hidden, bias)

    def __call__(self, x_TC: Tensor) -> Tensor:
        return self._down(self._kernels.silu_mul(self._gate(x_TC), self._up(x_TC)))
