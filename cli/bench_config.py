"""What `kvrelay bench serve` is told. The fields' docstrings are the flags' help."""

import math
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from kvrelay.cli.bench_workload import parse_lengths
from kvrelay.engine.errors import ConfigError

FIRST_RANDOM_ID = 1000  # with --http: below it stand most tokenizers' special tokens


@dataclass(frozen=True, kw_only=True)
class ServeBenchConfig:
    """Puts a load on a running router over gRPC, or on another server over HTTP, and tells how it bore it. With --rate
    requests come at times of their own (an open loop, Poisson arrivals), with --trace at the file's; else --concurrency
    users ask one after the other (a closed loop)."""

    router: str = "127.0.0.1:7070"
    """Address of the router."""
    model: str = ""
    """Model that is asked for; empty: whatever is served."""
    concurrency: int = 1
    """Closed loop: requests under way at once."""
    rate: float = 0.0
    """Open loop: arrivals a second; 0: a closed loop."""
    rates: str = ""
    """Open loops at these rates, one after the other, such as 0.5,1,2,4: what goodput is left at each."""
    http: str = ""
    """URL of an OpenAI-compatible server to ask instead of --router, such as http://127.0.0.1:8000; the environment's
    KVRELAY_API_KEY goes along as its key."""
    vocab_size: int = 30_000
    """With --http, which does not tell it: random prompts are of ids below this."""
    sharegpt: str = ""
    """File of conversations in ShareGPT's form: each one's first question is a prompt, and its answer's length the
    tokens to generate; instead of --input-len and --output-len."""
    trace: str = ""
    """File of arrivals and lengths: JSON lines as Mooncake's, or a CSV as Azure's; instead of --rate and lengths."""
    time_scale: float = 1.0
    """With --trace: multiplies the times between arrivals; 0.5: twice as fast."""
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
    plot: str = ""
    """File for a picture, .svg or .png: how times to first token and gaps are distributed, and with --rates what
    goodput is left at each. Needs the extra bench."""
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
        for name in ("timeout_s", "slo_ttft_ms", "slo_tpot_ms", "time_scale"):
            if getattr(self, name) is not None and not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} = {getattr(self, name)}: must be positive")
        if self.vocab_size <= FIRST_RANDOM_ID:
            raise ConfigError(f"vocab_size = {self.vocab_size}: must be above {FIRST_RANDOM_ID}")
        parse_lengths("input_len", self.input_len)
        parse_lengths("output_len", self.output_len)
        self.sweep()
        self._check_choices()

    def _check_choices(self) -> None:
        arrivals = [name for name in ("rate", "rates", "trace") if getattr(self, name)]
        if len(arrivals) > 1:
            raise ConfigError(f"{arrivals[0]}: not together with --{arrivals[1]}")
        if arrivals and self.concurrency > 1:
            raise ConfigError(f"{arrivals[0]}: an open loop has no --concurrency")
        if self.sharegpt and self.trace:
            raise ConfigError("sharegpt: not together with --trace")
        if self.prefix_len and (self.sharegpt or self.trace):
            raise ConfigError("prefix_len: prompts from a file have no further prefix")
        if self.plot and Path(self.plot).suffix not in (".svg", ".png"):
            raise ConfigError(f"plot = {self.plot}: must end in .svg or .png")
        if self.http and urlsplit(self.http).scheme not in ("http", "https"):
            raise ConfigError(f"http = {self.http}: must begin with http:// or https://")

    def sweep(self) -> tuple[float, ...]:
        """The rates to measure one after the other, where there are such."""
        try:
            rates = tuple(float(rate) for rate in self.rates.split(",")) if self.rates else ()
        except ValueError:
            raise ConfigError(f"rates = {self.rates!r}: expected numbers and commas, such as 0.5,1,2,4") from None
        if not all(0 < rate < math.inf for rate in rates):
            raise ConfigError(f"rates = {self.rates}: must be positive")
        return rates
