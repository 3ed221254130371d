"""Where a model's matrices come from when it runs quantised: put in fewer bits here, or a GGUF file's as they are.

Matrices are the weights of products. Embeddings that are looked up, norms and biases stay as the checkpoint has them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from kvrelay.engine.config import Quantization
from kvrelay.engine.errors import ModelError
from kvrelay.engine.gguf_architectures import find_architecture, read_config
from kvrelay.engine.gguf_codes import is_quantised, read_codes
from kvrelay.engine.gguf_file import Gguf
from kvrelay.engine.gguf_safetensors import TensorPlan
from kvrelay.engine.gguf_tensors import plan_tensors
from kvrelay.engine.model_info import ModelInfo
from kvrelay.engine.models.loader import MatrixSource
from kvrelay.engine.models.quantise import quantise
from kvrelay.kernels.base import QuantisedWeight

HEAD_BITS: Literal[8] = 8  # logits are what rounding is seen in first


@contextmanager
def matrix_source(info: ModelInfo, quantization: Quantization, dtype: torch.dtype) -> Iterator[MatrixSource]:
    """For a quantization other than none; open while a model is loaded. Raises: ModelError."""
    if quantization == "gguf":
        if info.gguf is None:
            raise ModelError(f"{info.name}: quantization = gguf takes a GGUF file's tensors, and this model is no GGUF")
        try:
            with Gguf(info.gguf) as gguf:
                yield _FromGguf(gguf, dtype)
        except OSError as error:
            raise ModelError(f"{info.gguf}: cannot be read: {error.strerror}") from error
    else:
        yield _Fitted(8 if quantization == "int8" else 4)


class _Fitted:
    """Implements `MatrixSource`: every matrix in so many bits, the head in 8."""

    def __init__(self, bits: Literal[4, 8]) -> None:
        self._bits: Literal[4, 8] = bits

    def stored(self, name: str) -> None:
        return None

    def made(self, weight_OC: Tensor, *, is_head: bool) -> QuantisedWeight:
        return quantise(weight_OC, HEAD_BITS if is_head else self._bits)


class _FromGguf:
    """Implements `MatrixSource`: what the file has quantised, under the names that its conversion gave."""

    def __init__(self, gguf: Gguf, dtype: torch.dtype) -> None:
        """Raises: ModelError."""
        architecture = find_architecture(gguf)
        plans = plan_tensors(gguf, architecture, read_config(gguf, architecture))
        self._plans = {plan.name: plan for plan in plans if is_quantised(plan.tensor.kind)}
        self._dtype = dtype

    def stored(self, name: str) -> QuantisedWeight | None:
        plan = self._plans.get(name)
        if plan is None:
            return None
        read = read_codes(plan.tensor)
        minimums = None if read.minimums is None else torch.from_numpy(read.minimums)
        weight = QuantisedWeight(
            torch.from_numpy(read.codes), torch.from_numpy(read.scales), minimums, read.bits, read.group, self._dtype
        )
        return weight if plan.change is None else weight[_order(plan)]

    def made(self, weight_OC: Tensor, *, is_head: bool) -> Tensor:
        return weight_OC


def _order(plan: TensorPlan) -> Tensor:
    """Which row of the file each row of the matrix is: what the conversion does to rows, done to their numbers."""
    assert plan.change is not None
    numbers = np.arange(plan.tensor.shape[0], dtype=np.float32)  # a float has all that are in a file
    return torch.from_numpy(plan.change(numbers)).long()
