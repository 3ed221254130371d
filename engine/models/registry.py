"""Which code runs a checkpoint: our decoder, or transformers' own modules. The one place that decides."""

from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch

from kvrelay.engine.config import Quantization
from kvrelay.engine.errors import ModelError
from kvrelay.engine.model_info import ModelInfo
from kvrelay.engine.models.base import Model
from kvrelay.engine.models.compiled import CompiledDecoder
from kvrelay.engine.models.config import decoder_config, is_known
from kvrelay.engine.models.decoder import Decoder
from kvrelay.engine.models.loader import Checkpoint, MatrixSource
from kvrelay.engine.models.options import DecoderConfig
from kvrelay.kernels.base import Kernels
from kvrelay.kernels.cpu.kernels import CpuKernels

ModelImpl = Literal["auto", "kvrelay", "transformers"]


def load_model(
    info: ModelInfo,
    dtype: torch.dtype,
    kernels: Kernels,
    device: torch.device,
    impl: ModelImpl,
    quantization: Quantization = "none",
) -> Model:
    """Load a model folder. auto: our decoder where it knows the architecture, else transformers.

    A setting that our decoder does not know is refused, not passed on: which code answers should not hang on a detail.
    Raises: ModelError.
    """
    if impl == "transformers" or (impl == "auto" and not is_known(info.config)):
        if quantization != "none":
            raise ModelError(f"{info.name}: quantization = {quantization}: models that transformers runs have none")
        from kvrelay.engine.models.fallback import load_fallback  # and with it transformers, which takes seconds

        return load_fallback(info, dtype, kernels, device)
    try:
        config = decoder_config(info.config)
    except ModelError as error:
        raise ModelError(f"{error.message} (--model-impl transformers may run it)") from error
    decoder = load_decoder(info, config, dtype, kernels, device, quantization)
    return CompiledDecoder(decoder, kernels) if isinstance(kernels, CpuKernels) else decoder


def load_decoder(
    info: ModelInfo,
    config: DecoderConfig,
    dtype: torch.dtype,
    kernels: Kernels,
    device: torch.device,
    quantization: Quantization,
) -> Decoder:
    """Raises: ModelError."""
    with _matrix_source(info, quantization, dtype) as source:
        return Decoder(config, Checkpoint(info.path, dtype, device, source), kernels, device)


def _matrix_source(
    info: ModelInfo, quantization: Quantization, dtype: torch.dtype
) -> AbstractContextManager[MatrixSource | None]:
    if quantization == "none":
        return nullcontext()
    from kvrelay.engine.models.quantised import matrix_source  # and with it what reads GGUF

    return matrix_source(info, quantization, dtype)
