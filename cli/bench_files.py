"""Loads that a user has as files: conversations in ShareGPT's form, and traces of what a service was asked. Pure.

A trace has arrivals and lengths, no texts. Mooncake's form, a JSON object a line, also says which blocks of 512 tokens
prompts share (`hash_ids`); Azure's is a CSV of times and lengths.
"""

import csv
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvrelay.engine.errors import ConfigError

HASHED_BLOCK = 512  # tokens that one of Mooncake's hash_ids stands for
MAX_TOKENS = 10_000_000  # of one prompt or answer; more is a mistake in the file
_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_HUMAN, _MODEL = ("human", "user"), ("gpt", "assistant", "chatgpt", "bing", "bard")


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedRequest:
    """One request of a trace."""

    arrival_s: float  # since the trace's first
    num_input_tokens: int
    num_output_tokens: int
    hash_ids: tuple[int, ...] = ()  # equal ids stand for equal tokens, each for one block; none: nothing is shared


@dataclass(frozen=True, slots=True)
class Exchange:
    """A first question and its answer."""

    question: str
    answer: str


def read_trace(file: str) -> list[TracedRequest]:
    """A trace's requests by arrival; CSV if the file's name says so, else JSON lines.

    Raises: ConfigError with the line and the field.
    """
    lines = _read("trace", file).splitlines()
    requests = parse_azure(lines, file) if file.endswith(".csv") else parse_mooncake(lines, file)
    if not requests:
        raise ConfigError(f"trace {file}: no request in it")
    first = min(request.arrival_s for request in requests)
    ordered = sorted(requests, key=lambda request: request.arrival_s)
    return [
        TracedRequest(
            arrival_s=request.arrival_s - first,
            num_input_tokens=request.num_input_tokens,
            num_output_tokens=request.num_output_tokens,
            hash_ids=request.hash_ids,
        )
        for request in ordered
    ]


def read_sharegpt(file: str) -> list[Exchange]:
    """Each conversation's first question and answer; those that begin otherwise are passed over.

    Raises: ConfigError with the conversation and the field.
    """
    return parse_sharegpt(_read("sharegpt", file), file)


def parse_mooncake(lines: Iterable[str], file: str) -> list[TracedRequest]:
    """`{"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [...]}` a line. Raises: ConfigError."""
    requests = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"trace {file}, line {number}"
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where}: not JSON: {error}") from None
        if not isinstance(found, dict):
            raise ConfigError(f"{where}: expected an object, found {_kind(found)}")
        num_input_tokens = _length(where, "input_length", found.get("input_length"))
        requests.append(
            TracedRequest(
                arrival_s=_milliseconds(where, found.get("timestamp")) / 1e3,
                num_input_tokens=num_input_tokens,
                num_output_tokens=_length(where, "output_length", found.get("output_length")),
                hash_ids=_hash_ids(where, found.get("hash_ids", []), num_input_tokens),
            )
        )
    return requests


def parse_azure(lines: Iterable[str], file: str) -> list[TracedRequest]:
    """A header and rows of TIMESTAMP,ContextTokens,GeneratedTokens. Raises: ConfigError."""
    reader = csv.DictReader(lines, strict=True)
    requests = []
    try:
        missing = [name for name in _AZURE if name not in (reader.fieldnames or ())]
        if missing:
            raise ConfigError(f"trace {file}, line 1: the header lacks {', '.join(missing)}")
        for row in reader:
            where = f"trace {file}, line {reader.line_num}"
            requests.append(
                TracedRequest(
                    arrival_s=_moment(where, row["TIMESTAMP"]),
                    num_input_tokens=_length(where, "ContextTokens", _whole(row["ContextTokens"])),
                    num_output_tokens=_length(where, "GeneratedTokens", _whole(row["GeneratedTokens"])),
                )
            )
    except csv.Error as error:
        raise ConfigError(f"trace {file}, line {reader.line_num}: {error}") from None
    return requests


def parse_sharegpt(text: str, file: str) -> list[Exchange]:
    """`[{"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}, ...]}, ...]`.

    Raises: ConfigError.
    """
    try:
        conversations = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"sharegpt {file}: not JSON: {error}") from None
    if not isinstance(conversations, list):
        raise ConfigError(f"sharegpt {file}: expected a list of conversations, found {_kind(conversations)}")
    exchanges = []
    for index, conversation in enumerate(conversations):
        where = f"sharegpt {file}, conversation {index}"
        if not isinstance(conversation, dict) or not isinstance(conversation.get("conversations"), list):
            raise ConfigError(f"{where}: expected an object with a list conversations")
        turns = [_turn(f"{where}, turn {i}", turn) for i, turn in enumerate(conversation["conversations"][:2])]
        if len(turns) == 2 and turns[0][0] in _HUMAN and turns[1][0] in _MODEL and turns[0][1] and turns[1][1]:
            exchanges.append(Exchange(turns[0][1], turns[1][1]))
    if not exchanges:
        raise ConfigError(f"sharegpt {file}: no conversation begins with a question and its answer")
    return exchanges


def _read(what: str, file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{what} {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{what} {file}: not UTF-8: byte {error.start}") from error


def _turn(where: str, turn: Any) -> tuple[str, str]:
    if not isinstance(turn, dict):
        raise ConfigError(f"{where}: expected an object, found {_kind(turn)}")
    for name in ("from", "value"):
        if not isinstance(turn.get(name), str):
            raise ConfigError(f"{where}: {name}: expected a string, found {_kind(turn.get(name))}")
    return turn["from"], turn["value"]


def _length(where: str, field: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value <= MAX_TOKENS:
        raise ConfigError(f"{where}: {field} = {_shown(value)}: must be a whole number in [1, {MAX_TOKENS}]")
    return int(value)


def _whole(text: Any) -> Any:
    """A CSV's field as a number, or as it was."""
    try:
        return int(text) if isinstance(text, str) and len(text) < 20 else text
    except ValueError:
        return text


def _milliseconds(where: str, value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < 1e15 or not math.isfinite(value):
        raise ConfigError(f"{where}: timestamp = {_shown(value)}: must be milliseconds, not negative")
    return float(value)


def _moment(where: str, text: Any) -> float:
    """Seconds since the epoch. A time without a zone is taken as UTC: only differences matter."""
    try:
        moment = datetime.fromisoformat(text)
    except (TypeError, ValueError):
        raise ConfigError(f"{where}: TIMESTAMP = {_shown(text)}: must be a date and a time") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _hash_ids(where: str, value: Any, num_input_tokens: int) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(one) is int for one in value):
        raise ConfigError(f"{where}: hash_ids: expected a list of whole numbers")
    num_blocks = -(-num_input_tokens // HASHED_BLOCK)
    if value and len(value) != num_blocks:
        raise ConfigError(
            f"{where}: hash_ids: {len(value)} of them, but {num_input_tokens} tokens are {num_blocks} blocks of"
            f" {HASHED_BLOCK}"
        )
    return tuple(value)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a truth value", type(None): "nothing"}
    return names.get(type(value), "a number")


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
