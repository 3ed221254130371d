"""What `kvrelay bench serve` is told. The fields' docstrings are the flags' help."""

import math
from dataclasses import dataclass

from kvrelay.cli.bench_workload import parse_lengths
from kvrelay.engine.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ServeBenchConfig:
    """Puts a load on a running router over gRPC and tells how it bore it. With --rate requests come at times of their
    own (an open loop, Poisson arrivals); else --concurrency users ask one after the other (a closed loop)."""

    router: str = "127.0.0.1:7070"
    """Address of the router."""
    model: str = ""
    """Model that is asked for; empty: whatever is served."""
    concurrency: int = 1
    """Closed loop: requests under way at once."""
    rate: float = 0.0
    """Open loop: arrivals a second; 0: a closed loop."""
    num_prompts: int = 0
    """Requests to measure; 0: as many as --duration-s allows, or 100 without it."""
    duration_s: float = 0.0
    """No request begins after this time; 0: no limit but --num-prompts."""
    input_len: str = "512"
    """Prompt tokens behind the shared prefix: N, uniform:LOW:HIGH or lognormal:MEAN:CV (standard deviation / mean)."""
    output_len: str = "64"
    """Tokens to generate, in the same forms."""
    num_prefixes: int = 1
    """Number of prefixes; each prompt begins with one of them."""
    prefix_len: int = 0
    """Tokens of each prefix."""
    ignore_eos: bool = True
    """Go on after the model's end of text, so that output lengths are exact."""
    seed: int = 0
    """Seed of lengths, prompts and arrivals; the same seed gives the same load."""
    cache_salt: str = ""
    """Prompts find only such cached KV as was computed under the same salt; empty: a new one each time, so that a load
    that comes again finds nothing of the last."""
    warmup: int = 1
    """Requests before the measured ones, one after the other, with prompts of their own."""
    timeout_s: float = 600.0
    """Time limit of each request."""
    slo_ttft_ms: float | None = None
    """Goodput counts requests whose first token came within this time."""
    slo_tpot_ms: float | None = None
    """Goodput counts requests whose further tokens took no more than this each."""
    json: str = ""
    """File for all figures and each request's as JSON; -: standard output, and the table goes to standard error."""

    def __post_init__(self) -> None:
        for name in ("concurrency", "num_prefixes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)}: must be at least 1")
        for name in ("num_prompts", "prefix_len", "warmup"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} = {getattr(self, name)}: must not be negative")
        for name in ("rate", "duration_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} = {getattr(self, name)}: must not be negative")
        for name in ("timeout_s", "slo_ttft_ms", "slo_tpot_ms"):
            if getattr(self, name) is not None and not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} = {getattr(self, name)}: must be positive")
        if self.rate and self.concurrency > 1:
            raise ConfigError("rate: an open loop has no --concurrency")
        parse_lengths("input_len", self.input_len)
        parse_lengths("output_len", self.output_len)
