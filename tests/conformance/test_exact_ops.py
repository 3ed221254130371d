"""What a model of transformers is computed with, on this machine: the bits of a row hang on that row alone."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from kvrelay.engine.models.fallback_exact import BY_ROW, EXACT_POWERS, ONE_CODE, Audit, ExactLinear, ExactOps
from kvrelay.kernels.dispatch import get_kernels

KERNELS = get_kernels(torch.device("cpu"))
NUM_ROWS = 67
WIDTHS = [8, 60, 97, 1030]  # the last takes more than one thread
PIECES = [(0, 1), (3, 4), (66, 67), (0, 16), (5, 21), (1, 67)]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def _three_threads() -> Iterator[None]:
    """A thread's share then ends in the middle of a row."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def rows(width: int, dtype: torch.dtype) -> Tensor:
    return (2 * torch.randn(NUM_ROWS, width, generator=torch.Generator().manual_seed(width))).to(dtype)


def is_invariant(function: Callable[[Tensor], Tensor], dtype: torch.dtype) -> bool:
    """Whether rows keep their bits in any company: alone, cut out, and where they are part of wider rows."""
    for width in WIDTHS:
        x = rows(width, dtype)
        for whole in (x, torch.cat([x, x], -1)[:, :width]):
            expected = function(whole)
            for start, end in PIECES:
                if not all(
                    torch.equal(function(piece)[: end - start], expected[start:end])
                    for piece in (whole[start:end], torch.cat([x[start:end], x[:3]]))
                ):
                    return False
    return True


ELEMENTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp,
    "expm1": torch.expm1,
    "tanh": torch.tanh,
    "erf": torch.erf,
    "log": lambda x: x.abs().log(),
    "log1p": lambda x: x.abs().log1p(),
    "sin": torch.sin,
    "cos": torch.cos,
}
ALONG_ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(-1),
    "mean": lambda x: x.mean(-1, keepdim=True),
    "var": lambda x: x.var(-1, unbiased=False),
    "amax": lambda x: x.amax(-1),
    "max": lambda x: x.max(-1).values,
    "min": lambda x: x.min(-1).values,
    "argmax": lambda x: x.argmax(-1),
    "softmax": lambda x: torch.softmax(x, -1),
    "_softmax": lambda x: torch.ops.aten._softmax(x, -1, False),
    "log_softmax": lambda x: torch.log_softmax(x, -1),
    "_log_softmax": lambda x: torch.ops.aten._log_softmax(x, -1, False),
    "layer_norm": lambda x: functional.layer_norm(x, x.shape[-1:]),
    "native_layer_norm": lambda x: torch.native_layer_norm(x, x.shape[-1:], None, None, 1e-5)[0],
    "rms_norm": lambda x: functional.rms_norm(x, x.shape[-1:]),
    "_fused_rms_norm": lambda x: torch.ops.aten._fused_rms_norm(x, x.shape[-1:], None, None)[0],
    "topk": lambda x: x.topk(3).values,
    "sort": lambda x: x.sort().values,
    "argsort": lambda x: x.argsort(stable=True),
    "cumsum": lambda x: x.cumsum(-1),
    "linalg_vector_norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
}


def matrix(x: Tensor) -> Tensor:
    """[8, C], for products with x."""
    return torch.randn(8, x.shape[-1], generator=torch.Generator().manual_seed(1)).to(x.dtype)


REPLACED: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: functional.linear(x, matrix(x), torch.ones(8, dtype=x.dtype)),
    "matmul": lambda x: x @ matrix(x).t(),
    "matmul_of_many": lambda x: (x[None] @ torch.stack([matrix(x).t()] * 2))[1],
    "sigmoid": torch.sigmoid,
    "sigmoid_method": lambda x: x.sigmoid(),
    "sigmoid_module": nn.Sigmoid(),
    "silu": functional.silu,
    "silu_module": nn.SiLU(),
    "gelu": functional.gelu,
    "gelu_tanh": nn.GELU(approximate="tanh"),
    "softplus": functional.softplus,
    "softplus_steep": nn.Softplus(beta=3.0, threshold=2.0),
    "rsqrt": lambda x: x.abs().rsqrt(),
}


def test_every_operation_on_the_lists_is_tried_here() -> None:
    assert set(ELEMENTWISE) == ONE_CODE
    assert set(ALONG_ROWS) == BY_ROW


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*ELEMENTWISE, *ALONG_ROWS])
def test_an_operation_on_the_lists_gives_a_row_the_same_bits_anywhere(name: str, dtype: torch.dtype) -> None:
    function = (ELEMENTWISE | ALONG_ROWS)[name]
    assert is_invariant(function, dtype)
    with torch.inference_mode(), Audit() as audit:
        function(rows(8, dtype))
    assert audit.inexact == set()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exponent", EXACT_POWERS)
def test_some_powers_are_exact_too(exponent: float, dtype: torch.dtype) -> None:
    assert is_invariant(lambda x: x.abs().pow(exponent), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", REPLACED)
def test_what_is_replaced_has_the_same_bits_anywhere_and_torchs_value(name: str, dtype: torch.dtype) -> None:
    function = REPLACED[name]
    expected = function(rows(97, dtype))
    with ExactOps(KERNELS):
        assert is_invariant(function, dtype)
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(function(rows(97, dtype)), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["sigmoid", "silu", "gelu", "gelu_tanh", "softplus", "linear", "matmul"])
def test_torchs_own_is_not_invariant(name: str) -> None:
    """If this fails, the replacement is no longer needed."""
    assert not is_invariant(REPLACED[name], torch.float32)


@pytest.mark.parametrize(
    ("named", "function"),
    [
        ("mish", functional.mish),
        ("exp2", torch.exp2),
        ("pow", lambda x: x.pow(1.7)),
        ("pow", lambda x: 2.0**x),
        ("mean", lambda x: x.mean(0)),
        ("sum", lambda x: x.sum()),
        ("sum", lambda x: x.t().sum(-1)),
        ("amax", lambda x: x.amax()),
        ("addmm", lambda x: torch.addmm(x[:, :2], x, x[:8, :2])),
        ("matmul", lambda x: x @ x[0]),
        ("einsum", lambda x: torch.einsum("tc,oc->to", x, x)),
    ],
)
def test_an_operation_that_is_not_known_to_be_exact_is_named(named: str, function: Callable[[Tensor], Tensor]) -> None:
    with torch.inference_mode(), ExactOps(KERNELS), Audit() as audit:
        function(rows(8, torch.float32))
    assert named in audit.inexact


def test_the_lesser_of_two_elements_is_exact() -> None:
    x = rows(8, torch.float32)
    with Audit() as audit:
        torch.min(x, x[:1])
    assert audit.inexact == set()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_linear_layer_gives_a_row_the_same_bits_anywhere(dtype: torch.dtype) -> None:
    assert is_invariant(lambda x: ExactLinear(KERNELS, matrix(x), None)(x[None])[0], dtype)


def test_the_kernels_own_operations_are_not_named() -> None:
    x, weight = rows(8, torch.float32), torch.randn(5, 8)
    with torch.inference_mode(), ExactOps(KERNELS), Audit() as audit:
        packed = ExactLinear(KERNELS, weight, torch.ones(5))(x[None])
    torch.testing.assert_close(packed[0], functional.linear(x, weight, torch.ones(5)))
    assert audit.inexact == set()
