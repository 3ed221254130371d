"""Compiles what the launchers of kvrelay.kernels.triton launch, for GPUs that are not here.

Run as a program, without the interpreter: prints the shared memory of each kernel, as JSON lines.
"""

import json
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import mangle_type

from kvrelay.kernels.base import AttentionBatch
from kvrelay.kernels.triton import attention, cache, norm
from kvrelay.kernels.triton.kernels import TritonKernels

CAPABILITIES = (80, 90)  # A100, H100


@dataclass
class Launched:
    """Stands for a kernel where a launcher names it, and compiles it instead of running it."""

    kernel: Any

    def __getitem__(self, grid: tuple[int, ...]) -> "Launched":
        return self

    def __call__(self, *args: Any, **constants: Any) -> None:
        arguments = dict(zip(self.kernel.arg_names, args, strict=False)) | constants
        # As at a launch: what is one, such as the stride of neighbours, is known to the compiler.
        known = {
            name: value
            for name, value in arguments.items()
            if name in constants or (isinstance(value, int) and value == 1)
        }
        signature = {
            name: "constexpr" if name in known else mangle_type(arguments[name]) for name in self.kernel.arg_names
        }
        source = ASTSource(fn=self.kernel, signature=signature, constexprs=known)
        for capability in CAPABILITIES:
            compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
            name = f"{self.kernel.__name__} {arguments}"
            print(json.dumps({"kernel": name, "capability": capability, "shared_bytes": compiled.metadata.shared}))


def launch_everything(num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    kernels = TritonKernels()
    pool = torch.zeros(8, 2, num_kv_heads, 16, head_dim, dtype=dtype)

    def rows(num_heads: int) -> Tensor:
        return torch.zeros(5, num_heads, head_dim, dtype=dtype)

    batch = AttentionBatch(torch.tensor([0, 1, 4]), torch.tensor([9, 80]), torch.zeros(2, 5, dtype=torch.int64))
    kernels.paged_attention(rows(num_heads), pool, batch, scale=0.1, window=40, softcap=2.0)
    kernels.reshape_and_cache(rows(num_kv_heads), rows(num_kv_heads), pool, torch.arange(5))
    kernels.rms_norm(rows(num_heads).flatten(1), torch.ones(num_heads * head_dim), 1e-5)


def main() -> None:
    for module, names in (
        (attention, ("_attend_to_split", "_add_splits")),
        (cache, ("_reshape_and_cache",)),
        (norm, ("_rms_norm",)),
    ):
        for name in names:
            setattr(module, name, Launched(getattr(module, name)))
    launch_everything(32, 8, 128, torch.bfloat16)
    launch_everything(9, 3, 64, torch.float32)
    launch_everything(16, 1, 512, torch.bfloat16)


if __name__ == "__main__":
    main()
