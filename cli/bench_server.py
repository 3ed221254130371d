"""The servers that `kvrelay bench serve` can ask: a router over gRPC, or any OpenAI-compatible one over HTTP."""

import secrets
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Protocol, Self

from kvrelay.cli.bench_config import FIRST_RANDOM_ID, ServeBenchConfig
from kvrelay.cli.bench_workload import Prompt
from kvrelay.cli.client import ModelView, Piece, RouterClient
from kvrelay.cli.http_client import HttpClient
from kvrelay.cli.load import Ask
from kvrelay.engine.errors import ConfigError, KvrelayError, Unavailable

RPC_TIMEOUT_S = 10.0
UNKNOWN_CONTEXT = 2**31  # of a server that does not tell it: it will refuse by itself what is too long


class Server(Protocol):
    """What a load is put on."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def model(self) -> ModelView:
        """What is served. Raises: KvrelayError."""

    def vocabulary(self, model: ModelView) -> list[int]:
        """What random prompts are made of."""

    async def tokenize(self, text: str) -> tuple[int, ...]:
        """Raises: KvrelayError."""

    def asker(self) -> Ask:
        """How it is asked by one run of a load: what it caches of one run is of no use to the next."""


class RouterServer:
    """A router over gRPC."""

    def __init__(self, config: ServeBenchConfig) -> None:
        self._config = config
        self._client = RouterClient(config.router)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.__aexit__(kind, error, trace)

    async def model(self) -> ModelView:
        return await self._client.model(timeout_s=RPC_TIMEOUT_S)

    def vocabulary(self, model: ModelView) -> list[int]:
        """All tokens but EOS and BOS."""
        special = {*model.eos_token_ids, model.bos_token_id}
        return [token_id for token_id in range(model.vocab_size) if token_id not in special]

    async def tokenize(self, text: str) -> tuple[int, ...]:
        return await self._client.tokenize(text, timeout_s=RPC_TIMEOUT_S)

    def asker(self) -> Ask:
        return asker(self._client, self._config)


class HttpServer:
    """An OpenAI-compatible server: /v1/models and /v1/completions, and /tokenize as vLLM has it for --sharegpt."""

    def __init__(self, config: ServeBenchConfig) -> None:
        self._config = config
        self._model = config.model
        self._client = HttpClient(config.http)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.__aexit__(kind, error, trace)

    async def model(self) -> ModelView:
        told = await self._client.ask("GET", "/v1/models", timeout_s=RPC_TIMEOUT_S)
        served = {entry.get("id"): entry for entry in _entries(told)}
        if not served or (self._model and self._model not in served):
            raise ConfigError(f"model = {self._model!r}: served there: {', '.join(map(str, served)) or 'none'}")
        self._model = self._model or next(iter(served))
        context = served[self._model].get("max_model_len")
        return ModelView(
            model=self._model,
            architecture="",
            vocab_size=self._config.vocab_size,
            max_model_len=context if isinstance(context, int) and context > 0 else UNKNOWN_CONTEXT,
            eos_token_ids=(),
            bos_token_id=None,
        )

    def vocabulary(self, model: ModelView) -> list[int]:
        return list(range(FIRST_RANDOM_ID, model.vocab_size))

    async def tokenize(self, text: str) -> tuple[int, ...]:
        body = {"model": self._model, "prompt": text}
        try:
            told = await self._client.ask("POST", "/tokenize", body, timeout_s=RPC_TIMEOUT_S)
        except KvrelayError as error:
            if error.code == "NOT_FOUND":
                raise ConfigError("sharegpt: this server has no /tokenize to count with") from error
            raise
        found = told.get("tokens") if isinstance(told, dict) else None
        if not isinstance(found, list) or not all(isinstance(token_id, int) for token_id in found):
            raise Unavailable("/tokenize: no list of tokens in its answer")
        return tuple(found)

    def asker(self) -> Ask:
        salt = self._config.cache_salt or secrets.token_hex(8)

        def ask(prompt: Prompt) -> AsyncIterator[Piece]:
            body: dict[str, Any] = {
                "model": self._model,
                "prompt": list(prompt.token_ids),
                "max_tokens": prompt.max_tokens,
                "temperature": 0.0,
                "ignore_eos": self._config.ignore_eos,
                "cache_salt": salt,
            }
            return self._client.complete(body, timeout_s=self._config.timeout_s)

        return ask


def server_of(config: ServeBenchConfig) -> Server:
    """The one that the flags name; to be made inside the event loop."""
    return HttpServer(config) if config.http else RouterServer(config)


def asker(client: RouterClient, config: ServeBenchConfig) -> Ask:
    """How a router is asked for a prompt of this load."""
    salt = config.cache_salt or secrets.token_hex(8)

    def ask(prompt: Prompt) -> AsyncIterator[Piece]:
        return client.generate(
            prompt.token_ids,
            model=config.model,
            sampling={"max_tokens": prompt.max_tokens, "temperature": 0.0, "ignore_eos": config.ignore_eos},
            cache_salt=salt,
            timeout_s=config.timeout_s,
        )

    return ask


def _entries(told: Any) -> list[dict[str, Any]]:
    entries = told.get("data") if isinstance(told, dict) else None
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
