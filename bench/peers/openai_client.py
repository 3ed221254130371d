"""Asks a server of OpenAI's API, such as vLLM, for a completion, as little in its way as can be.

Hand-made HTTP, for the client computes on the cores that it measures. One connection a request.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from kvrelay.cli.bench_config import ServeBenchConfig
from kvrelay.cli.bench_workload import Prompt
from kvrelay.cli.client import Piece, Usage
from kvrelay.cli.load import Ask
from kvrelay.engine.errors import KvrelayError, RemoteError, Unavailable


def asker(address: str, model: str, config: ServeBenchConfig) -> Ask:
    """How such a server is asked for a prompt of a load of `kvrelay bench serve`."""

    def ask(prompt: Prompt) -> AsyncIterator[Piece]:
        body = {
            "model": model,
            "prompt": prompt.token_ids,
            "max_tokens": prompt.max_tokens,
            "temperature": 0.0,
            "ignore_eos": config.ignore_eos,
            "cache_salt": config.cache_salt,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        return complete(address, body, config.timeout_s)

    return ask


async def complete(address: str, body: dict[str, Any], timeout_s: float) -> AsyncIterator[Piece]:
    """Stream one completion. Raises: KvrelayError."""
    finish_reason = ""
    try:
        async with asyncio.timeout(timeout_s):
            async for event in _events(address, json.dumps(body).encode()):
                if "error" in event:
                    raise RemoteError("INTERNAL", str(event["error"]), False)
                for choice in event["choices"]:
                    finish_reason = choice["finish_reason"] or ""
                    yield Piece(token_ids=tuple(choice.get("token_ids") or ()), finish_reason=finish_reason)
                if event.get("usage"):
                    yield Piece(finish_reason=finish_reason, usage=_usage(event["usage"]))
    except KvrelayError:
        raise
    except TimeoutError:
        raise RemoteError("DEADLINE_EXCEEDED", f"no whole answer within {timeout_s} s", False) from None
    except (OSError, EOFError, ValueError) as error:  # refused, cut off, not the HTTP that is expected
        raise Unavailable(f"{address}: {error!r}") from error


async def _events(address: str, payload: bytes) -> AsyncIterator[dict[str, Any]]:
    """The server-sent events of one answer, which comes in chunks."""
    host, port = address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n".encode() + payload)
        status = (await reader.readline()).decode().split()
        while (await reader.readline()).strip():  # the headers
            pass
        if status[1:2] != ["200"]:
            raise RemoteError("INTERNAL", f"{' '.join(status)}: {(await reader.read(2000)).decode()}", False)
        rest = b""
        while size := int(await reader.readline(), 16):
            rest += await reader.readexactly(size)
            await reader.readexactly(2)
            *events, rest = rest.split(b"\n\n")
            for event in events:
                said = event.removeprefix(b"data: ")
                if said != b"[DONE]":
                    yield json.loads(said)
    finally:
        writer.close()


def _usage(said: dict[str, Any]) -> Usage:
    details = said.get("prompt_tokens_details") or {}
    return Usage(
        prompt_tokens=said["prompt_tokens"],
        completion_tokens=said["completion_tokens"],
        cached_tokens=details.get("cached_tokens") or 0,
    )
