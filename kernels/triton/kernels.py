"""The kernels of a GPU: what is written in Triton, and the reference for the rest, which torch runs there too."""

from torch import Tensor

from kvrelay.kernels.base import AttentionBatch
from kvrelay.kernels.reference import ReferenceKernels
from kvrelay.kernels.triton.attention import paged_attention
from kvrelay.kernels.triton.cache import reshape_and_cache
from kvrelay.kernels.triton.norm import rms_norm


class TritonKernels(ReferenceKernels):
    """Implements `base.Kernels` for GPUs, batch-invariant like the reference.

    Its own so far: attention, the cache, RMSNorm. Products, LayerNorm, rotary and activations are the reference's.
    """

    name = "triton"

    def rms_norm(self, x_TC: Tensor, weight_C: Tensor, eps: float) -> Tensor:
        return rms_norm(x_TC, weight_C, eps)

    def reshape_and_cache(self, k_TKD: Tensor, v_TKD: Tensor, kv_N2KBD: Tensor, slot_mapping_T: Tensor) -> None:
        reshape_and_cache(k_TKD, v_TKD, kv_N2KBD, slot_mapping_T)

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
        return paged_attention(q_THD, kv_N2KBD, batch, scale=scale, window=window, softcap=softcap)
