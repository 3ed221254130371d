"""`kvrelay model`: which models are here, making one ready, and what one is and takes. Loads no torch."""

import json
from collections import Counter
from dataclasses import asdict, dataclass

from kvrelay.cli.config import ModelFetchConfig, ModelListConfig, ModelShowConfig
from kvrelay.cli.main import ExitCode
from kvrelay.engine.config import EngineConfig, parse_size
from kvrelay.engine.errors import ModelError
from kvrelay.engine.kv_layout import KVLayout
from kvrelay.engine.model_cache import Progress
from kvrelay.engine.model_info import AttentionShape, ModelInfo, attention_shape, has_chat_template, read_model_info
from kvrelay.engine.model_store import load_stored_info, resolve, stored_models
from kvrelay.engine.models.config import decoder_config, is_known
from kvrelay.engine.weight_files import StoredTensor, read_tensors

_KV_DTYPES = ("bfloat16", "float32")
_UNITS = (("GB", 10**9), ("MB", 10**6), ("kB", 10**3))


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whose code runs a model with `--model-impl auto`."""

    implementation: str  # kvrelay, transformers (which says only when it loads a model whether it can), or none
    reason: str  # why it is refused, if it is


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What `show` says; the fields are the JSON's."""

    name: str
    path: str
    architecture: str
    implementation: str
    reason: str
    num_parameters: int
    num_tensors: int
    num_files: int
    weights_bytes: int
    weights_dtypes: dict[str, int]  # bytes of each
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    chat_template: bool
    attention: AttentionShape | None
    kv_token_bytes: dict[str, int]  # by dtype; empty where the config does not say
    kv_cache_size: str  # as it was given
    kv_cache_tokens: dict[str, int]
    fingerprint: str


def list_models(config: ModelListConfig) -> int:
    """One line a model. Returns: the exit code. Raises: KvrelayError."""
    models = stored_models()
    if config.json:
        for model in models:
            print(json.dumps(asdict(model), default=str))
        return ExitCode.OK
    width = max(len(model.name) for model in models)
    for model in models:
        size = shown_bytes(model.size_bytes) if model.size_bytes else "-"
        print(f"{model.name:<{width}}  {model.state:<10}  {size:>9}  {model.path or model.source}")
    return ExitCode.OK


def fetch_model(config: ModelFetchConfig) -> int:
    """Make a model ready, and print its folder. Returns: the exit code. Raises: KvrelayError."""
    path = resolve(config.model, progress=Progress.here(Progress.LINES))
    read_model_info(path)
    read_tensors(path)
    print(path)
    return ExitCode.OK


def show_model(config: ModelShowConfig) -> int:
    """What a model is and takes. Returns: the exit code. Raises: KvrelayError."""
    info = load_stored_info(config.model)
    report = make_report(info, read_tensors(info.path), config.kv_cache_size, has_chat_template(info.path))
    print(json.dumps(asdict(report)) if config.json else "\n".join(describe(report)))
    return ExitCode.OK


def make_report(info: ModelInfo, tensors: dict[str, StoredTensor], kv_cache_size: str, has_template: bool) -> Report:
    """Pure."""
    verdict = judge(info)
    try:
        attention = attention_shape(info.config)
    except ModelError as error:
        attention, verdict = None, Verdict(implementation="none", reason=verdict.reason or error.message)
    layouts = _layouts(attention) if attention else {}
    dtypes: Counter[str] = Counter()
    for stored in tensors.values():
        dtypes[stored.dtype] += stored.size_bytes
    return Report(
        name=info.name,
        path=str(info.path),
        architecture=info.architecture,
        implementation=verdict.implementation,
        reason=verdict.reason,
        num_parameters=sum(stored.num_elements for stored in tensors.values()),
        num_tensors=len(tensors),
        num_files=len({stored.file for stored in tensors.values()}),
        weights_bytes=dtypes.total(),
        weights_dtypes=dict(dtypes.most_common()),
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        eos_token_ids=info.eos_token_ids,
        bos_token_id=info.bos_token_id,
        chat_template=has_template,
        attention=attention,
        kv_token_bytes={dtype: layout.token_bytes for dtype, layout in layouts.items()},
        kv_cache_size=kv_cache_size,
        kv_cache_tokens={dtype: layout.tokens_in(parse_size(kv_cache_size)) for dtype, layout in layouts.items()},
        fingerprint=info.fingerprint,
    )


def judge(info: ModelInfo) -> Verdict:
    """Whose code would run a model."""
    if not is_known(info.config):
        return Verdict(implementation="transformers", reason="")
    try:
        decoder_config(info.config)
    except ModelError as error:
        return Verdict(implementation="none", reason=error.message)
    return Verdict(implementation="kvrelay", reason="")


def _layouts(shape: AttentionShape) -> dict[str, KVLayout]:
    return {
        dtype: KVLayout(
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            block_size=EngineConfig.block_size,
            dtype=dtype,
        )
        for dtype in _KV_DTYPES
    }


def describe(report: Report) -> list[str]:
    """A report as lines for a person. Pure."""
    runs = {
        "kvrelay": "kvrelay's decoder runs it",
        "transformers": "transformers may run it: seen when it is loaded",
        "none": f"refused: {report.reason}",
    }
    dtypes = ", ".join(f"{dtype} {shown_bytes(size)}" for dtype, size in report.weights_dtypes.items())
    lines = [
        ("folder", report.path),
        ("architecture", f"{report.architecture}; {runs[report.implementation]}"),
        ("parameters", f"{report.num_parameters:,} in {_count(report.num_tensors, 'tensor')}"),
        ("weights", f"{shown_bytes(report.weights_bytes)} in {_count(report.num_files, 'file')}: {dtypes}"),
    ]
    if report.attention:
        shape = report.attention
        heads = f"{shape.num_heads} of queries, {shape.num_kv_heads} of keys and values, of {shape.head_dim} each"
        lines += [("layers", f"{shape.num_layers:,}"), ("heads", heads)]
    lines += [
        ("vocabulary", f"{report.vocab_size:,} tokens"),
        ("context", f"{report.max_model_len:,} tokens"),
        ("end of text", ", ".join(map(str, report.eos_token_ids)) or "none"),
        ("chat template", "yes" if report.chat_template else "no"),
    ]
    for dtype, size in report.kv_token_bytes.items():
        fits = f"{report.kv_cache_tokens[dtype]:,} tokens in {report.kv_cache_size}"
        lines.append((f"KV in {dtype}", f"{size:,} bytes a token; {fits}"))
    return [report.name, *(f"  {name:<16} {value}" for name, value in lines)]


def shown_bytes(size: int) -> str:
    """Three digits or so, and a unit."""
    unit, value = next(((unit, size / scale) for unit, scale in _UNITS if size >= scale), ("B", size))
    return f"{value:.{0 if value >= 100 or unit == 'B' else 1 if value >= 10 else 2}f} {unit}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
