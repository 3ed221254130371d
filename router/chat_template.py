"""A model's chat template: messages to text, in jinja2's sandbox, as Hugging Face renders it."""

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvrelay.engine.errors import InvalidArgument, ModelError
from kvrelay.router.api import ChatMessage

# What a template that is given unexpected messages can raise. The sandbox lets nothing else through.
_RENDER_ERRORS = (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError)


class ChatTemplate:
    """Renders messages, with the prompt for the assistant's answer behind them. Holds no state between calls."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        """Raises: ModelError if the template cannot be parsed."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._special_tokens = special_tokens
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError(f"chat template: {error}") from error

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """The prompt's text, special tokens spelled out.

        Raises: InvalidArgument with the template's own words, where it does not accept the messages.
        """
        turns = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return self._template.render(
                messages=turns, tools=None, documents=None, add_generation_prompt=True, **self._special_tokens
            )
        except _RENDER_ERRORS as error:
            raise InvalidArgument("chat.messages", [message.role for message in messages], str(error)) from error


def find_chat_template(folder: Path, tokenizer_config: dict[str, Any]) -> ChatTemplate | None:
    """A model folder's template: chat_template.jinja, else tokenizer_config.json's; None if it has none.

    Raises: ModelError.
    """
    file = folder / "chat_template.jinja"
    source = file.read_text(encoding="utf-8") if file.is_file() else tokenizer_config.get("chat_template")
    if isinstance(source, list):
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    if source is None:
        return None
    if not isinstance(source, str):
        raise ModelError(f"{folder / 'tokenizer_config.json'}: chat_template: expected a string or named templates")
    return ChatTemplate(source, special_tokens(tokenizer_config))


def special_tokens(tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and their like, as far as tokenizer_config.json names them."""
    found = {}
    for name, value in tokenizer_config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            found[name] = content
    return found


class _Generation(Extension):
    """{% generation %} marks the assistant's words for training; rendering shows what is inside."""

    tags = {"generation"}  # noqa: RUF012  the base class declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)
