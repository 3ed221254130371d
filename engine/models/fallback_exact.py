"""Keeps a model that others wrote batch-invariant: the bits of a row depend on that row alone (see kernels.reference).

`ExactOps` swaps torch functions whose result depends on a row's place, while a model of transformers runs: matrix
products go to our kernels, and activations that torch computes in two ways (for most elements, and for the last ones of
a tensor or of a thread's share) are made of functions that it computes in one. `Audit` watches one run and names every
operation that is not known to be exact, so that a model which is not says so.

The list was found by measuring; tests/conformance/test_exact_ops.py repeats that on the machine at hand.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunction
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from kvrelay.kernels.base import Kernels

_SQRT_HALF = 0.5**0.5
_TANH_GELU = ((2 / torch.pi) ** 0.5, 0.044715)


class ExactLinear(nn.Module):
    """A linear layer that our kernels compute: packed once, so `weight` is not to be had."""

    def __init__(self, kernels: Kernels, weight_OC: Tensor, bias_O: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight_OC.shape
        self._kernels = kernels
        self._weight = kernels.pack(weight_OC)
        self._bias = bias_O

    def forward(self, x: Tensor) -> Tensor:
        with DisableTorchFunction():
            rows = self._kernels.linear(x.flatten(0, -2), self._weight, self._bias)
            return torch.unflatten(rows, 0, x.shape[:-1])


class ExactOps(TorchFunctionMode):
    """While entered, torch functions that are not batch-invariant are computed by ones that are."""

    def __init__(self, kernels: Kernels) -> None:
        super().__init__()
        self._kernels = kernels
        self._replaced: Mapping[Any, Callable[..., Tensor]] = {
            functional.linear: self._linear,
            torch.matmul: self._matmul,
            torch.bmm: self._matmul,
            torch.mm: self._matmul,
            Tensor.matmul: self._matmul,
            Tensor.bmm: self._matmul,
            Tensor.mm: self._matmul,
            torch.sigmoid: _sigmoid,
            Tensor.sigmoid: _sigmoid,
            torch.rsqrt: _rsqrt,  # not in bfloat16
            Tensor.rsqrt: _rsqrt,
            functional.silu: _silu,
            functional.gelu: _gelu,
            functional.softplus: _softplus,
        }

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        function: Callable[..., Any] = self._replaced.get(func, func)
        return function(*args, **kwargs or {})

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """With a weight that no linear layer holds: a router's, an expert's."""
        with DisableTorchFunction():
            rows = self._kernels.linear(input.reshape(-1, input.shape[-1]), self._kernels.pack(weight), bias)
            return torch.unflatten(rows, 0, input.shape[:-1])

    def _matmul(self, input: Tensor, other: Tensor) -> Tensor:
        if input.shape[-1] == 1 or min(input.dim(), other.dim()) < 2:
            return torch.matmul(input, other)  # one product each: there is nothing to sum; the audit names the others
        if other.dim() == 2:
            return self._linear(input, other.t())
        batch = torch.broadcast_shapes(input.shape[:-2], other.shape[:-2])  # type: ignore[no-untyped-call]
        lefts = input.expand(*batch, *input.shape[-2:]).flatten(0, -3)
        rights = other.expand(*batch, *other.shape[-2:]).flatten(0, -3)
        products = [self._linear(left, right.t()) for left, right in zip(lefts, rights, strict=True)]
        return torch.unflatten(torch.stack(products), 0, batch)


def _sigmoid(input: Tensor) -> Tensor:
    return (1 / (1 + torch.exp(-input.float()))).to(input.dtype)


def _silu(input: Tensor, inplace: bool = False) -> Tensor:
    x = input.float()
    return (x / (1 + torch.exp(-x))).to(input.dtype)


def _gelu(input: Tensor, approximate: str = "none") -> Tensor:
    x = input.float()
    if approximate == "none":
        return (0.5 * x * (1 + torch.erf(x * _SQRT_HALF))).to(input.dtype)
    outer, inner = _TANH_GELU
    return (0.5 * x * (1 + torch.tanh(outer * (x + inner * x * x * x)))).to(input.dtype)


def _softplus(input: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    x = input.float() * beta
    return (torch.where(x > threshold, x, torch.log1p(torch.exp(x))) / beta).to(input.dtype)


def _rsqrt(input: Tensor) -> Tensor:
    return (1 / input.float().sqrt()).to(input.dtype)


# Operations that move or choose elements, or whose result IEEE 754 defines to the last bit. index_add is among them for
# its order: experts add to a row in the order of their numbers, whoever else they serve.
_DEFINED = frozenset(
    """abs add clamp clamp_max clamp_min div eq floor ge gt hardtanh index_add isnan le lt maximum minimum mul ne neg
    reciprocal relu round rsub sign sqrt square sub
    alias cat chunk clone concat contiguous copy detach dropout embedding expand expand_as flatten gather index
    index_put index_select item masked_fill movedim narrow new_empty new_full new_ones new_zeros ones_like pad permute
    repeat repeat_interleave reshape scatter select slice split split_with_sizes squeeze stack t to tril triu transpose
    type_as unbind unflatten unsqueeze view where zeros_like empty_like full_like""".split()  # noqa: SIM905 - as a list it would fill the page
)
# Operations that torch computes by the same code wherever an element stands.
ONE_CODE = frozenset({"exp", "expm1", "tanh", "erf", "log", "log1p", "sin", "cos"})
# Operations along the last dimension, one thread's work each row where its elements lie side by side.
BY_ROW = frozenset(
    """sum mean var amax max min argmax softmax _softmax log_softmax _log_softmax layer_norm native_layer_norm rms_norm
    _fused_rms_norm topk sort argsort cumsum linalg_vector_norm""".split()  # noqa: SIM905 - as a list it would fill the page
)
EXACT_POWERS = (0.5, 2, 3)


class Audit(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, `inexact` gathers the names of operations not known to be batch-invariant.

    What runs with torch functions disabled is ours: the kernels, which have tests of their own.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inexact: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if torch._C._is_torch_function_enabled():
            name, known = func.overloadpacket.__name__, func._schema.arguments
            arguments = {argument.name: argument.default_value for argument in known if argument.has_default_value()}
            arguments |= zip((argument.name for argument in known), args, strict=False)
            if not is_exact(name, arguments | dict(kwargs or {})):
                self.inexact.add(name)
        return func(*args, **kwargs or {})


def is_exact(name: str, arguments: Mapping[str, Any]) -> bool:
    """Whether an ATen operation, called so (defaults included), is known to be batch-invariant."""
    values = [x for value in arguments.values() for x in (value if isinstance(value, list | tuple) else [value])]
    floats = [x for x in values if isinstance(x, Tensor) and x.is_floating_point()]
    name = name.removesuffix("_")
    if not floats or name in _DEFINED or name in ONE_CODE:
        return True
    first = floats[0]
    if name in BY_ROW:
        return "other" in arguments or (first.stride(-1) == 1 and _is_last(arguments, first.dim()))
    if name == "rsqrt":
        return first.dtype == torch.float32
    if name == "pow":
        exponent = arguments["exponent"]
        return not isinstance(exponent, Tensor) and exponent in EXACT_POWERS
    return name in ("bmm", "matmul") and first.shape[-1] == 1


def _is_last(arguments: Mapping[str, Any], num_dims: int) -> bool:
    """Whether an operation goes along the last dimension alone."""
    if "normalized_shape" in arguments:
        return len(arguments["normalized_shape"]) == 1
    dim = arguments.get("dim")  # none, or none given: all of them
    dims = dim if isinstance(dim, list | tuple) else [dim]
    return len(dims) == 1 and dims[0] in (-1, num_dims - 1)
