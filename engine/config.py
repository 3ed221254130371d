"""The engine's configuration: what a node that computes needs to know. Standard library only.

The fields' docstrings are the flags' help; a role's own config extends this one.
"""

import ipaddress
import re
from dataclasses import dataclass
from typing import Literal

from kvrelay.engine.errors import ConfigError

MAX_AGEING_S = 1e6
Quantization = Literal["none", "int8", "int4", "gguf"]
KvTransport = Literal["auto", "shm", "ucx", "tcp", "zmq"]
KvTransferDtype = Literal["auto", "bfloat16", "int8", "fp8"]

_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def parse_size(text: str) -> int:
    """Bytes of "512MiB", "1.5 GiB" or "1048576".

    Raises: ConfigError.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if not match or match[2].upper() not in _UNITS:
        raise ConfigError(f"size {text!r}: expected a number and a unit, such as 512MiB or 1GiB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


NO_PORT = -1


def check_port(name: str, port: int, *, or_none: bool = False) -> None:
    """`or_none`: NO_PORT is well, and says that there is none. Raises: ConfigError."""
    if not 0 <= port < 65536 and not (or_none and port == NO_PORT):
        raise ConfigError(f"{name} = {port}: must be in [{NO_PORT if or_none else 0}, 65535]")


def check_advertise(bind: str, advertise: str) -> None:
    """Raises: ConfigError for a bind to every address with no address to be dialled at."""
    if bind in ("0.0.0.0", "::") and not advertise:
        raise ConfigError(f"bind = {bind}: says no address that others could dial; set --advertise")


def is_loopback(host: str) -> bool:
    """Whether an address is this machine's own, whatever its network."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What the scheduler, the KV pool and the model runner are told."""

    model: str = "smollm2"
    """A Hugging Face folder, a GGUF file, a hub id, or the name of an embedded model."""
    model_impl: Literal["auto", "kvrelay", "transformers"] = "auto"
    """Whose code runs the model; auto: kvrelay's where it knows the architecture, else that of transformers."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the model runs."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Of weights, compute and KV; auto: the checkpoint's, and float32 where the CPU has no bfloat16."""
    kernels: Literal["auto", "reference"] = "auto"
    """What computes; auto: kernels compiled here if there is a C++ compiler; reference: plain torch, slowly."""
    quantization: Quantization = "none"
    """Weights as in the checkpoint (none), in fewer bits from loading on (int8, int4), or a GGUF file's own (gguf)."""
    threads: int = 0
    """CPU threads of the model; 0: as many as this process may run on."""
    nice: int = 0
    """Niceness of the threads that compute, 0 to 19: how far they step back for others on the same cores."""
    block_size: int = 16
    """Tokens a KV block."""
    kv_cache_size: str = "1GiB"
    """Room for KV, as a size."""
    num_blocks: int = 0
    """Number of KV blocks; 0: as many as kv-cache-size holds."""
    swap_space: str = "256MiB"
    """Host memory, as a size, for the KV of preempted requests; 0: they are computed again. Prefill nodes use none."""
    max_model_len: int = 0
    """Longest prompt and output together, in tokens; 0: the model's own limit."""
    max_num_seqs: int = 64
    """Most sequences in one step."""
    max_num_batched_tokens: int = 512
    """Most tokens computed in one step; longer prompts are computed in chunks."""
    long_prefill_token_threshold: int = 0
    """Most tokens of one prompt in one step, so that short ones are not held up behind it; 0: no limit."""
    priority_ageing_s: float = 60.0
    """A request that has waited so much longer ranks with those of a priority one lower; 0: it never does."""
    prefix_caching: bool = True
    """Reuse the KV blocks of equal prompt prefixes."""
    watermark: float = 0.05
    """Share of the KV blocks kept free for running requests to grow into when a new one is admitted."""

    def __post_init__(self) -> None:
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)}: must be at least 1")
        for name in ("threads", "num_blocks", "max_model_len", "long_prefill_token_threshold"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} = {getattr(self, name)}: must not be negative")
        if not 0 <= self.nice <= 19:
            raise ConfigError(f"nice = {self.nice}: must be in [0, 19]")
        if not 0.0 <= self.watermark < 1.0:
            raise ConfigError(f"watermark = {self.watermark}: must be in [0, 1)")
        if not 0.0 <= self.priority_ageing_s <= MAX_AGEING_S:
            raise ConfigError(f"priority_ageing_s = {self.priority_ageing_s}: must be in [0, {MAX_AGEING_S:g}]")
        for name in ("kv_cache_size", "swap_space"):
            parse_size(getattr(self, name))
