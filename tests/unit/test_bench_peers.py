"""bench/peers: what it asks both sides for, and what it understands of the answers."""

import asyncio
import importlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvrelay.cli.bench_config import ServeBenchConfig
from kvrelay.cli.bench_workload import Prompt
from kvrelay.cli.client import Piece
from kvrelay.engine.errors import RemoteError, Unavailable

FOLDER = Path(__file__).resolve().parents[2] / "bench" / "peers"
EVENTS = (
    b'data: {"choices": [{"token_ids": [5], "finish_reason": null}]}\n\n'
    b'data: {"choices": [{"token_ids": [6, 7], "finish_reason": "length"}]}\n\n'
    b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 3}}\n\n'
    b"data: [DONE]\n\n"
)


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """A module of bench/peers by its name."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


@asynccontextmanager
async def answering(status: bytes, body: bytes) -> AsyncIterator[str]:
    """A server that gives one answer to whatever it is asked, and then hangs up."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 " + status + b"\r\nTransfer-Encoding: chunked\r\n\r\n" + body)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


def chunked(body: bytes, size: int) -> bytes:
    chunks = [body[i : i + size] for i in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in [*chunks, b""])


async def ask(client: Any, address: str) -> list[Piece]:
    config = ServeBenchConfig(timeout_s=60)
    prompt = Prompt(index=0, token_ids=(1, 2, 3), max_tokens=3)
    return [piece async for piece in client.asker(address, "model", config)(prompt)]


@pytest.mark.parametrize("size", [1, 7, 80, 10_000])
async def test_an_answer_is_read_however_it_is_cut_into_chunks(peers: Callable[[str], Any], size: int) -> None:
    async with answering(b"200 OK", chunked(EVENTS, size)) as address:
        *pieces, last = await ask(peers("openai_client"), address)
    assert [piece.token_ids for piece in pieces] == [(5,), (6, 7)]
    assert last.finish_reason == "length"
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.cached_tokens) == (3, 3, 0)


async def test_an_answer_that_is_cut_off_is_an_error_that_may_be_retried(peers: Callable[[str], Any]) -> None:
    whole = chunked(EVENTS, 80)
    for length in range(0, len(whole) - len(b"0\r\n\r\n"), 41):
        async with answering(b"200 OK", whole[:length]) as address:
            with pytest.raises(Unavailable):
                await ask(peers("openai_client"), address)


async def test_a_refusal_says_what_the_server_said(peers: Callable[[str], Any]) -> None:
    async with answering(b"400 Bad Request", b"no such model") as address:
        with pytest.raises(RemoteError, match="400 Bad Request: no such model"):
            await ask(peers("openai_client"), address)


def test_every_pass_of_a_batch_has_its_prompts_and_every_prefill_its_own(peers: Callable[[str], Any]) -> None:
    shape = peers("engine").Shape
    decode = list(shape.parse("decode:3:8", 20).passes(2, seed=0, vocab_size=100))
    prefill = list(shape.parse("prefill:8", 20).passes(2, seed=0, vocab_size=100))
    assert [asked["num_steps"] for asked in decode] == [4, 20, 20]
    assert [asked["num_steps"] for asked in prefill] == [0, 0, 0]
    assert [[len(prompt) for prompt in asked["prompts"]] for asked in decode] == [[8] * 3] * 3
    assert decode[0]["prompts"] == decode[1]["prompts"] == decode[2]["prompts"]
    assert len({tuple(asked["prompts"][0]) for asked in prefill}) == 3
    assert decode == list(shape.parse("decode:3:8", 20).passes(2, seed=0, vocab_size=100))


@pytest.mark.parametrize("text", ["decode:8", "prefill", "prefill:512:1", "decode:x:16", "encode:8:16", ""])
def test_a_shape_that_is_none_says_what_is_expected(peers: Callable[[str], Any], text: str) -> None:
    with pytest.raises(SystemExit, match="expected decode:BATCH:CONTEXT or prefill:TOKENS"):
        peers("engine").Shape.parse(text, 128)
