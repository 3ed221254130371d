"""The HTTP side of `kvrelay bench serve`, against a server that frames its answers in every legal way."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from support.http_server import FakeHttpServer, serving

from kvrelay.cli import bench_serve
from kvrelay.cli.bench_config import ServeBenchConfig
from kvrelay.cli.client import API_KEY, Piece, Usage
from kvrelay.cli.http_client import HttpClient
from kvrelay.cli.main import ExitCode
from kvrelay.engine.errors import ConfigError, RemoteError, Unavailable

BODY = {"model": "fake", "prompt": [1, 2], "max_tokens": 3}


def beside(test: Callable[[FakeHttpServer, HttpClient], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(30), serving() as server, HttpClient(server.url + "/v1/") as client:
            await test(server, client)

    asyncio.run(run())


async def completed(client: HttpClient, body: dict[str, Any] = BODY) -> list[Piece]:
    return [piece async for piece in client.complete(body, timeout_s=10)]


@pytest.mark.parametrize("chunk_bytes", [1, 7, 10_000])
def test_a_stream_is_read_however_its_chunks_are_cut_and_its_connection_is_used_again(chunk_bytes: int) -> None:
    async def test(server: FakeHttpServer, client: HttpClient) -> None:
        server.chunk_bytes = chunk_bytes
        for _ in range(3):
            *pieces, last = await completed(client)
            assert [piece.text for piece in pieces] == ["é0", "é1", "é2"]
            assert last == Piece(
                finish_reason="length", usage=Usage(prompt_tokens=2, completion_tokens=3, cached_tokens=3)
            )
        assert server.num_connections == 1
        path, headers, body = server.requests[0]
        assert path == "/v1/completions"
        assert body == BODY | {"stream": True, "stream_options": {"include_usage": True}}
        assert "authorization" not in headers

    beside(test)


def test_the_key_of_the_environment_goes_along(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(API_KEY, "sesame")

    async def test(server: FakeHttpServer, client: HttpClient) -> None:
        await client.ask("GET", "/v1/models", timeout_s=5)
        assert server.requests[0][1]["authorization"] == "bearer sesame"  # the fake folds case

    beside(test)


@pytest.mark.parametrize(
    ("status", "body", "code", "retryable", "said"),
    [
        (400, '{"error": {"message": "too long"}}', "INVALID_ARGUMENT", False, "HTTP 400: too long"),
        (401, '{"error": "no key"}', "UNAUTHENTICATED", False, "HTTP 401: no key"),
        (429, '{"message": "full"}', "RESOURCE_EXHAUSTED", True, "HTTP 429: full"),
        (503, "<html>gone\n</html>", "UNAVAILABLE", True, "HTTP 503: <html>gone </html>"),
        (500, "", "INTERNAL", False, "HTTP 500: HTTP 500"),
    ],
)
def test_a_refusal_has_the_server_s_words(status: int, body: str, code: str, retryable: bool, said: str) -> None:
    async def test(server: FakeHttpServer, client: HttpClient) -> None:
        server.failures = {0: (status, body)}
        with pytest.raises(RemoteError) as caught:
            await completed(client)
        assert (caught.value.code, caught.value.retryable, str(caught.value)) == (code, retryable, said)
        assert len(await completed(client)) == 4

    beside(test)


def test_an_answer_that_breaks_off_or_fails_in_mid_stream_is_an_error() -> None:
    async def test(server: FakeHttpServer, client: HttpClient) -> None:
        server.stops_short = True
        with pytest.raises(Unavailable, match="stopped before its end"):
            await completed(client)
        server.stops_short, server.error_in_stream = False, "a node was lost"
        with pytest.raises(RemoteError, match="a node was lost") as caught:
            await completed(client)
        assert caught.value.code == "UNAVAILABLE"

    beside(test)


def test_an_answer_that_is_cut_off_anywhere_is_an_error_that_may_be_retried() -> None:
    events = (
        b'data: {"choices": [{"text": "a", "finish_reason": "length"}]}\n\n',
        b'data: {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 1}}\n\n',
        b"data: [DONE]\n\n",
    )
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in (*events, b""))
    whole = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks
    said = whole

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.append(asyncio.current_task())
        await reader.readuntil(b"\r\n\r\n")
        writer.write(said)
        writer.close()

    served: list[Any] = []

    async def run() -> None:
        nonlocal said
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            async with HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}") as client:
                assert [piece.text for piece in await completed(client)] == ["a", ""]
                for length in range(len(whole) - len(b"0\r\n\r\n") + 1):
                    said = whole[:length]
                    with pytest.raises(Unavailable):
                        await completed(client)
            await asyncio.gather(*served)

    asyncio.run(run())


@pytest.mark.parametrize("said", [b"", b"SSH-2.0\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"])
def test_what_is_no_http_is_an_error_with_the_address(said: bytes) -> None:
    served: list[Any] = []

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(said)
        writer.close()
        served.append(asyncio.current_task())

    async def run() -> None:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
            async with HttpClient(f"http://{address}") as client:
                with pytest.raises(Unavailable, match=address):
                    await completed(client)
            await asyncio.gather(*served)

    asyncio.run(run())


def test_a_server_that_says_nothing_is_given_up_at_the_deadline() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.append(asyncio.current_task())
        await reader.read()
        writer.close()

    served: list[Any] = []

    async def run() -> None:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            async with HttpClient(url) as client:
                with pytest.raises(RemoteError) as caught:
                    [piece async for piece in client.complete(BODY, timeout_s=0.05)]
                assert caught.value.code == "DEADLINE_EXCEEDED"
            await asyncio.gather(*served)

    asyncio.run(run())


def measured(change: Callable[[FakeHttpServer], None] = lambda _: None, **options: Any) -> tuple[int, FakeHttpServer]:
    async def run() -> tuple[int, FakeHttpServer]:
        async with asyncio.timeout(30), serving() as server:
            change(server)
            config = ServeBenchConfig(
                http=server.url, **{"num_prompts": 4, "input_len": "9", "output_len": "5"} | options
            )
            return await asyncio.to_thread(bench_serve.run, config), server

    return asyncio.run(run())


@pytest.mark.parametrize("ends_apart", [False, True])
def test_a_load_over_http_has_the_same_figures(tmp_path: Path, ends_apart: bool) -> None:
    def change(server: FakeHttpServer) -> None:
        server.ends_apart = ends_apart

    file = tmp_path / "x.json"
    code, server = measured(change, concurrency=2, json=str(file))
    assert code == ExitCode.OK
    found = json.loads(file.read_text())
    assert found["model"]["model"] == "fake"
    assert [row["num_output_tokens"] for row in found["requests"]] == [5] * 4
    assert [len(row["message_s"]) for row in found["requests"]] == [5] * 4
    assert found["summary"]["num_cached_tokens"] == 12
    bodies = [body for path, _, body in server.requests if path == "/v1/completions"]
    assert len(bodies) == 4 + 1
    for body in bodies:
        assert (body["model"], body["max_tokens"], body["ignore_eos"], body["temperature"]) == ("fake", 5, True, 0)
        assert len(body["prompt"]) == 9
        assert min(body["prompt"]) >= 1000
    assert len({body["cache_salt"] for body in bodies}) == 1


def test_conversations_are_counted_by_the_server(tmp_path: Path) -> None:
    file = tmp_path / "share.json"
    turns = [{"from": "human", "value": "a bb ccc"}, {"from": "gpt", "value": "one two"}]
    file.write_text(json.dumps([{"conversations": turns}]))
    _, server = measured(sharegpt=str(file), num_prompts=1)
    body = server.requests[-1][2]
    assert (body["prompt"], body["max_tokens"]) == ([1, 2, 3], 2)

    def change(server: FakeHttpServer) -> None:
        server.has_tokenize = False

    with pytest.raises(ConfigError, match="has no /tokenize"):
        measured(change, sharegpt=str(file))


def test_a_model_that_is_not_served_there_is_a_usage_error() -> None:
    with pytest.raises(ConfigError, match="model = 'other': served there: fake"):
        measured(model="other")
