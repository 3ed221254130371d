"""Which code runs a checkpoint: our decoder, or transformers' own modules. The one place that decides."""

from typing import Literal

import torch

from kvrelay.engine.errors import ModelError
from kvrelay.engine.model_info import ModelInfo
from kvrelay.engine.models.base import Model
from kvrelay.engine.models.compiled import CompiledDecoder
from kvrelay.engine.models.config import decoder_config, is_known
from kvrelay.engine.models.decoder import Decoder
from kvrelay.engine.models.loader import Checkpoint
from kvrelay.kernels.base import Kernels
from kvrelay.kernels.cpu.kernels import CpuKernels

ModelImpl = Literal["auto", "kvrelay", "transformers"]


def load_model(info: ModelInfo, dtype: torch.dtype, kernels: Kernels, device: torch.device, impl: ModelImpl) -> Model:
    """Load a model folder. auto: our decoder where it knows the architecture, else transformers.

    A setting that our decoder does not know is refused, not passed on: which code answers should not hang on a detail.
    Raises: ModelError.
    """
    if impl == "transformers" or (impl == "auto" and not is_known(info.config)):
        from kvrelay.engine.models.fallback import load_fallback  # and with it transformers, which takes seconds

        return load_fallback(info, dtype, kernels, device)
    try:
        config = decoder_config(info.config)
    except ModelError as error:
        raise ModelError(f"{error.message} (--model-impl transformers may run it)") from error
    decoder = Decoder(config, Checkpoint(info.path, dtype, device), kernels, device)
    return CompiledDecoder(decoder, kernels) if isinstance(kernels, CpuKernels) else decoder
