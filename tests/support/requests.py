"""Requests to a router, good and bad, as messages and as bytes."""

from collections.abc import Sequence
from typing import Any

import psutil

from kvrelay.proto import inference_pb2 as pb

GOOD_PROMPT = (70, 71, 72)


def request(prompt: Sequence[int] | str | pb.ChatPrompt | None = GOOD_PROMPT, **more: Any) -> pb.GenerateRequest:
    """A good request but for what is given; `sampling` by field names."""
    message = pb.GenerateRequest(sampling=pb.SamplingParams(**more.pop("sampling", {})), **more)
    if isinstance(prompt, str):
        message.text = prompt
    elif isinstance(prompt, pb.ChatPrompt):
        message.chat.CopyFrom(prompt)
    elif prompt is not None:
        message.token_ids.SetInParent()
        message.token_ids.ids.extend(prompt)
    return message


def sampling(**fields: Any) -> pb.GenerateRequest:
    return request(sampling=fields)


def chat(*turns: tuple[str, str]) -> pb.ChatPrompt:
    return pb.ChatPrompt(messages=[pb.ChatMessage(role=role, content=content) for role, content in turns])


def field(number: int, content: bytes) -> bytes:
    """A field of a message, as it is on the wire."""
    size, rest = [], len(content)
    while rest >= 0x80:
        size.append(rest & 0x7F | 0x80)
        rest >>= 7
    return bytes([number << 3 | 2, *size, rest]) + content


def resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)
