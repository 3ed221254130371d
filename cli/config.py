"""What the commands that are no role are told. The fields' docstrings are the flags' help."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, get_args

from tyro.conf import Positional, UseAppendAction, arg

from kvrelay.engine.config import EngineConfig, KvTransferDtype, KvTransport, check_port, parse_size
from kvrelay.engine.errors import ConfigError
from kvrelay.engine.traces import check_endpoint
from kvrelay.node.config import check_data_tls


@dataclass(frozen=True, kw_only=True)
class UpConfig(EngineConfig):
    """Starts a router, prefill nodes and decode nodes on this machine, as processes that end with this one."""

    threads: int = 0
    """CPU threads of each node; 0: the cores that this process may run on, divided among the decode nodes, and again
    among the prefill nodes, which step back for the decode nodes (`--nice 19`)."""
    prefill: int = 1
    """Number of prefill nodes; 0: the decode nodes compute prompts as well."""
    decode: int = 1
    """Number of decode nodes."""
    kv_transport: KvTransport = "auto"
    """What moves KV between the nodes; auto: the fastest that they have."""
    kv_transfer_dtype: KvTransferDtype = "auto"
    """In what KV travels between the nodes; auto: as it is; bfloat16, int8, fp8: fewer bytes, not exact."""
    data_tls_cert: str = ""
    """PEM file of the nodes' certificate for KV over TCP with TLS; the three data-tls files go together."""
    data_tls_key: str = ""
    """PEM file of that certificate's key."""
    data_tls_ca: str = ""
    """PEM file of the authority that has signed it."""
    prepare_structured_output: bool = False
    """Have the nodes read the vocabulary for structured outputs at the start, and not when the first one comes."""
    otlp_endpoint: str = ""
    """OpenTelemetry collector (OTLP over HTTP) for traces of router and nodes, such as http://127.0.0.1:4318; empty:
    none. Needs `pip install 'kvrelay[otel]'`."""
    port: int = 0
    """Port of the router's gRPC; 0: 7070, or any free one where that is taken."""
    http_port: int = 0
    """Port of the router's HTTP; 0: 8000, or any free one where that is taken; -1: none."""
    drain_timeout_s: float = 5.0
    """How long requests may still run after Ctrl-C."""
    ready_timeout_s: float = 300.0
    """How long the roles may take until all are ready."""
    verbose: bool = False
    """Show the roles' logs; else their last lines are shown if one fails."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prefill < 0:
            raise ConfigError(f"prefill = {self.prefill}: must not be negative")
        if self.decode < 1:
            raise ConfigError(f"decode = {self.decode}: must be at least 1")
        check_port("port", self.port)
        check_port("http_port", self.http_port, or_none=True)
        check_data_tls(self.data_tls_cert, self.data_tls_key, self.data_tls_ca)
        check_endpoint(self.otlp_endpoint)
        for name in ("drain_timeout_s", "ready_timeout_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} = {getattr(self, name)}: must be positive")


@dataclass(frozen=True, kw_only=True)
class DemoConfig(UpConfig):
    """Starts a router and its nodes, asks one question through gRPC, shows where the time went, and stops."""

    prompt: str = "What is the capital of France?"
    """The question."""
    max_tokens: int = 64
    """Most tokens of the answer."""


@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """How answers are drawn; limits that are not given are left to the router."""

    max_tokens: int | None = None
    """Most tokens of an answer; by default as many as the context allows."""
    min_tokens: int | None = None
    """Tokens before which nothing ends an answer."""
    temperature: float = 0.0
    """Randomness; 0: always the likeliest token, the same answer each time."""
    top_k: int | None = None
    """Sample among this many likeliest tokens; 0: all."""
    top_p: float | None = None
    """Sample among the likeliest tokens that have this much probability together."""
    min_p: float | None = None
    """Sample among tokens at least this likely, relative to the likeliest."""
    presence_penalty: float | None = None
    """Taken from a token's score once it is in the answer."""
    frequency_penalty: float | None = None
    """Taken from a token's score for each time it is in the answer."""
    repetition_penalty: float | None = None
    """Divides the score of tokens that are in the prompt or the answer; 1: none."""
    seed: int | None = None
    """Seed of the sampling; the same seed gives the same answer."""
    stop: UseAppendAction[tuple[str, ...]] = ()
    """Text that ends an answer; may be given several times."""
    stop_token_ids: UseAppendAction[tuple[int, ...]] = ()
    """Token that ends an answer; may be given several times."""
    ignore_eos: bool = False
    """Go on after the model's end of text."""
    bad_words: UseAppendAction[tuple[str, ...]] = ()
    """Word that shall not be in an answer; may be given several times."""
    priority: int = 0
    """Lower runs first; waiting makes up for it."""
    timeout_s: float | None = None
    """Time limit of each answer."""

    def __post_init__(self) -> None:
        if self.timeout_s is not None and not 0 < self.timeout_s < math.inf:
            raise ConfigError(f"timeout_s = {self.timeout_s}: must be positive")

    def sampling(self) -> dict[str, object]:
        """The sampling parameters to send, by their names on the wire."""
        penalties = ("presence_penalty", "frequency_penalty", "repetition_penalty")
        limits = ("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "seed")
        names = (*limits, *penalties)
        given: dict[str, object] = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        lists = ("stop", "stop_token_ids", "bad_words")
        given |= {name: list(getattr(self, name)) for name in lists if getattr(self, name)}
        return given | ({"ignore_eos": True} if self.ignore_eos else {})


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(SamplingFlags):
    """Sends prompts to a router and streams the answers; limits that are not given are left to the router."""

    prompt: Annotated[Positional[tuple[str, ...]], arg(metavar="PROMPT ...", help_behavior_hint="")]
    """Each is a user's message, in the model's chat template; they run at once, and the answers are shown in order. A
    - reads one from standard input."""
    router: str = "127.0.0.1:7070"
    """Address of the router."""
    model: str = ""
    """Model that is asked for; empty: whatever is served."""
    raw: bool = False
    """Send each prompt as it is, without the chat template."""
    n: int = 1
    """Answers to each prompt; with a temperature they differ. The first is shown as it comes, the others behind it."""
    logprobs: int | None = None
    """With --json: show each token's log-probability, and those of this many likeliest tokens in its place."""
    prompt_logprobs: int | None = None
    """With --json: the same for the prompt's tokens."""
    json_object: bool = False
    """Have each answer be a JSON object."""
    json_schema: str = ""
    """Have each answer be JSON with this schema: the schema, or @ and the file that has it."""
    regex: str = ""
    """Have each answer match this regular expression, as a whole."""
    choice: UseAppendAction[tuple[str, ...]] = ()
    """Have each answer be one of these texts; to be given several times."""
    json: bool = False
    """Print one JSON object a line and answer: text, token_ids, finish_reason, usage, timings, handoff."""
    timings: bool = False
    """Show on standard error where each answer's time went."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.prompt:
            raise ConfigError("prompt: at least one is needed")
        if self.prompt.count("-") > 1:
            raise ConfigError("prompt: standard input can be read only once")
        if self.n < 1:
            raise ConfigError(f"n = {self.n}: must be at least 1")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None and not self.json:
                raise ConfigError(f"{name}: only --json shows them")
        if sum(map(bool, (self.json_object, self.json_schema, self.regex, self.choice))) > 1:
            raise ConfigError("json_object, json_schema, regex, choice: an answer has one form")

    def sampling(self) -> dict[str, object]:
        names = ("logprobs", "prompt_logprobs")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        given |= {"n": self.n} if self.n > 1 else {}
        form = self._structured_output()
        return super().sampling() | given | ({"structured_output": form} if form else {})

    def _structured_output(self) -> dict[str, object]:
        """Raises: ConfigError for a file that cannot be read."""
        if self.json_object:
            return {"json_object": {}}
        if self.choice:
            return {"choice": {"choices": list(self.choice)}}
        if not self.json_schema:
            return {"regex": self.regex} if self.regex else {}
        if not self.json_schema.startswith("@"):
            return {"json_schema": self.json_schema}
        try:
            return {"json_schema": Path(self.json_schema[1:]).read_text(encoding="utf-8")}
        except (OSError, ValueError) as error:
            raise ConfigError(f"json_schema = {self.json_schema}: {error}") from error


@dataclass(frozen=True, kw_only=True)
class ChatConfig(SamplingFlags):
    """Talks with the model through a router. At a terminal: lines are edited as in a shell, Ctrl-C stops an answer and
    no more, Ctrl-D leaves, /help lists the rest. With standard input from a pipe or a file, each line is a turn."""

    router: str = "127.0.0.1:7070"
    """Address of the router."""
    model: str = ""
    """Model that is asked for; empty: whatever is served."""
    system: str = ""
    """What the model is told before the conversation."""
    temperature: float = 0.7
    """Randomness; 0: always the likeliest token, so that /retry says the same again."""
    stats: bool | None = None
    """Show each answer's tokens a second and time to first token; by default at a terminal only."""
    history: bool = True
    """Keep what was typed for the next time, in ~/.local/state/kvrelay (or $XDG_STATE_HOME)."""


@dataclass(frozen=True, kw_only=True)
class TopConfig:
    """Shows the cluster as it works: the router, its nodes, their KV and queues. q or Ctrl-C leaves."""

    router: str = "127.0.0.1:7070"
    """Address of the router."""
    interval_s: float = 1.0
    """Seconds between two looks; nodes report once a second."""
    once: bool = False
    """Print one look and end; rates, which take two looks, are left out."""
    json: bool = False
    """Print each look as one line of JSON instead: all that the router tells of itself and of its nodes."""
    timeout_s: float = 5.0
    """How long to wait for the router."""

    def __post_init__(self) -> None:
        for name in ("interval_s", "timeout_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} = {getattr(self, name)}: must be positive")


@dataclass(frozen=True, kw_only=True)
class HealthConfig:
    """Asks a role's gRPC health service: exit code 0 if it serves, 4 if it drains or does not answer."""

    address: Annotated[Positional[str], arg(metavar="ADDRESS", help_behavior_hint="(default: 127.0.0.1:7070)")] = (
        "127.0.0.1:7070"
    )
    """host:port of a router or node."""
    timeout_s: float = 5.0
    """How long to wait for an answer."""


@dataclass(frozen=True, kw_only=True)
class ModelListConfig:
    """Lists the embedded models, and what is in kvrelay's cache and in the model hub's."""

    json: bool = False
    """Print one JSON object a line and model: name, state, size_bytes, source, path."""


@dataclass(frozen=True, kw_only=True)
class ModelFetchConfig:
    """Makes a model ready: fetches and converts it if need be, checks it, and prints its folder."""

    model: Annotated[Positional[str], arg(metavar="MODEL", help_behavior_hint="")]
    """The name of an embedded model, a hub id, or a GGUF file."""


@dataclass(frozen=True, kw_only=True)
class ModelShowConfig:
    """Shows what a model on this machine is, what its weights and its KV take, and what would run it."""

    model: Annotated[Positional[str], arg(metavar="MODEL", help_behavior_hint="")]
    """A folder, the name of an embedded model, a hub id, or a GGUF file."""
    kv_cache_size: str = EngineConfig.kv_cache_size
    """Room for KV, as a size: how many tokens would fit."""
    json: bool = False
    """Print one JSON object."""

    def __post_init__(self) -> None:
        parse_size(self.kv_cache_size)


@dataclass(frozen=True, kw_only=True)
class PlotBenchConfig:
    """Draws what `kvrelay bench serve --json FILE` has kept."""

    figures: Annotated[Positional[str], arg(metavar="FIGURES.json", help_behavior_hint="")]
    """The JSON file."""
    picture: Annotated[Positional[str], arg(metavar="PICTURE", help_behavior_hint="")]
    """The file to write, .svg or .png."""

    def __post_init__(self) -> None:
        if not self.picture.endswith((".svg", ".png")):
            raise ConfigError(f"picture = {self.picture}: must end in .svg or .png")


@dataclass(frozen=True, kw_only=True)
class EngineBenchConfig(EngineConfig):
    """Measures the engine in this process, without a network: decode and prefill, in tokens a second."""

    batch_sizes: tuple[int, ...] = (1, 8, 32)
    """Decode: sequences in a batch."""
    contexts: tuple[int, ...] = (16,)
    """Decode: tokens of each sequence before the first measured step."""
    decode_steps: int = 128
    """Decode: measured steps, each a token a sequence."""
    prompt_lens: tuple[int, ...] = (512, 1024)
    """Prefill: tokens of a prompt that is computed alone."""
    repeats: int = 3
    """Times that each is measured; the table has the medians."""
    seed: int = 0
    """Seed of the prompts."""
    json: str = ""
    """File for all figures as JSON; -: standard output, and the table goes to standard error."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("decode_steps", "repeats"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)}: must be at least 1")
        for name in ("batch_sizes", "contexts", "prompt_lens"):
            if any(value < 1 for value in getattr(self, name)):
                raise ConfigError(f"{name} = {getattr(self, name)}: must all be at least 1")


@dataclass(frozen=True, kw_only=True)
class TransferBenchConfig(EngineConfig):
    """Measures transfers of KV between two processes of this machine, beside what bounds them: copies in memory and
    bare sockets. With --prefill: what of the transfer a request waits for, behind a real prefill."""

    transports: tuple[str, ...] = ()
    """Names as --kv-transport takes them, and inproc (both nodes in this process); none: all."""
    size: str = "128MiB"
    """Bytes of one transfer."""
    blocks: tuple[str, ...] = ("16KiB", "64KiB", "360KiB")
    """Sizes of scattered blocks, beside one contiguous buffer."""
    repeats: int = 5
    """Turns; in each, all are measured one after the other."""
    fixed_transfers: int = 100
    """Transfers of one block and of none in each turn, for what a transfer costs by itself."""
    loaded: bool = False
    """Two busy loops run beside it, as a prefill and a decode node that compute."""
    peer: UseAppendAction[tuple[str, ...]] = ()
    """NAME=COMMAND: another system to measure in the same turns, such as bench/peers/transfer_nixl.py; may be given
    several times."""
    prefill: int = 0
    """Measure behind real prefills of so many tokens instead."""
    chunk: int = 256
    """--prefill: tokens of a step."""
    prompts: int = 40
    """--prefill: prompts to measure."""
    json: str = ""
    """File for all figures as JSON; -: standard output, and the table goes to standard error."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("repeats", "fixed_transfers", "chunk", "prompts"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)}: must be at least 1")
        if self.prefill < 0:
            raise ConfigError(f"prefill = {self.prefill}: must not be negative")
        for size in (self.size, *self.blocks):
            if not parse_size(size) or parse_size(size) % 512:
                raise ConfigError(f"size {size}: must be a multiple of 512 bytes")
        self._check_names()

    def _check_names(self) -> None:
        for name in self.transports:
            if name not in _measured_transports():
                raise ConfigError(f"transports = {name}: there are {', '.join(_measured_transports())}")
        for given in self.peer:
            if "=" not in given:
                raise ConfigError(f"peer = {given}: must be NAME=COMMAND")

    def named_transports(self) -> tuple[str, ...]:
        return self.transports or _measured_transports()

    def named_peers(self) -> tuple[tuple[str, str], ...]:
        """Names and commands."""
        return tuple((name, command) for name, _, command in (given.partition("=") for given in self.peer))


def _measured_transports() -> tuple[str, ...]:
    return (*(name for name in get_args(KvTransport) if name != "auto"), "inproc")
