"""Sends requests to an engine server, which is not a kvpool worker, over OpenAI's HTTP API.

It takes a worker's messages (`Prefill`, `Generate`) and returns a worker's replies, so that the
gateway treats both alike. The server's own connector reads and writes KV, so segments and grants
are ignored. What servers do not report (their queue and their compute time) is measured here.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec
import numpy as np

from kvpool.config.engine_server import EngineServer
from kvpool.errors import (
    DeadlineExceeded,
    EngineFailed,
    InvalidArgument,
    KvpoolError,
    Overloaded,
    Unavailable,
    brief,
)
from kvpool.smoothing import smoothed
from kvpool.wire import messages as m
from kvpool.wire.client import Undo

CONNECT_TIMEOUT_S = 2.0
MAX_ERROR_BYTES = 4096  # bytes read of an error's body
_RUNNING = re.compile(r"^vllm:num_requests_running(?:\{[^}]*\})? (\S+)", re.MULTILINE)
_WAITING = re.compile(r"^vllm:num_requests_waiting(?:\{[^}]*\})? (\S+)", re.MULTILINE)

Encode = Callable[[str], list[int]]


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None

    @property
    def cached(self) -> int:
        return (self.prompt_tokens_details and self.prompt_tokens_details.cached_tokens) or 0


class _Choice(msgspec.Struct):
    text: str = ""
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Completion(msgspec.Struct):
    """One event of a stream, or a whole response."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


@dataclass(slots=True, eq=False)
class _Request:
    queued_tokens: int
    is_decoding: bool = False
    context_tokens: int = 0


class EngineClient:
    """A connection pool to one engine server, and this conductor's requests there.

    Args:
        encode: converts text to token ids without special tokens, for servers that return only
            text. None if there is no tokenizer; such servers then fail.
    """

    def __init__(self, entry: EngineServer, encode: Encode | None = None) -> None:
        self.entry = entry
        self._encode = encode
        self._requests: set[_Request] = set()
        self._tpot_s = 0.0
        self._prefill_tokens_per_s = 0.0
        self._mean_prompt = 0.0
        key = entry.api_key.get_secret_value()
        self._http = httpx.AsyncClient(
            base_url=entry.base_url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            # Callers set deadlines: a token may take all of the request's time.
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            trust_env=False,
        )

    async def close(self) -> None:
        """Close the connections. Running requests fail."""
        await self._http.aclose()

    async def send(self, request: m.Message) -> None:
        """Raises InvalidArgument: an engine server takes no one-way messages."""
        raise InvalidArgument(f"an engine server does not take {type(request).__name__}")

    # ------------------------------------------------------------ requests

    async def call(
        self, request: m.Message, timeout_s: float, undo: Undo | None = None
    ) -> m.PrefillReply:
        """Have the server compute a prompt. Its connector stores the KV.

        Raises:
            DeadlineExceeded, Unavailable, EngineFailed, Overloaded: the prefill failed.
            InvalidArgument: the server refuses the request, or the message is not a `Prefill`.
        """
        if not isinstance(request, m.Prefill):
            raise InvalidArgument(f"an engine server does not take {type(request).__name__}")
        tokens = _tokens(request.token_ids)
        body = self._body(tokens, 1, request.engine_fields)
        started = time.monotonic()
        with self._working(len(tokens)) as (_, is_alone), _typed(self.entry):
            try:
                async with asyncio.timeout(max(0.0, timeout_s)):
                    response = await self._http.post(
                        "/v1/completions", json=body, headers=_named(request.request_id)
                    )
            except TimeoutError:
                raise DeadlineExceeded(
                    f"{self.entry.worker_id} did not prefill within {timeout_s:.3g} s"
                ) from None
            if response.status_code != 200:
                raise self._error(response.status_code, response.headers, response.content)
            completion = self._read(response.content)
        seconds = time.monotonic() - started
        cached = min(completion.usage.cached if completion.usage else 0, len(tokens))
        phases = self._prefilled(len(tokens) - cached, seconds, is_alone)
        by_tier = {"engine": cached} if cached else {}
        return m.PrefillReply(
            *(cached, len(tokens) - cached, 0, phases, {}, {}), tokens_by_tier=by_tier
        )

    async def stream(
        self, request: m.Generate, timeout_s: float
    ) -> AsyncGenerator[m.GenerateChunk | m.GenerateReply, None]:
        """Stream the tokens, then the report.

        Closing the stream early closes the connection, and the server stops the work.

        Args:
            timeout_s: not used; the caller limits the wait for each item.

        Raises:
            Unavailable, EngineFailed, Overloaded, InvalidArgument: as `call`.
        """
        tokens = _tokens(request.token_ids)
        body = self._body(tokens, request.sampling.max_tokens, request.engine_fields) | {
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        started = time.monotonic()
        first_at = 0.0
        count = 0
        usage = _Usage()
        reason = ""
        phases: dict[str, float] = {}
        with self._working(len(tokens)) as (ours, is_alone), _typed(self.entry):
            asked = self._http.stream(
                "POST", "/v1/completions", json=body, headers=_named(request.request_id)
            )
            async with asked as response:
                if response.status_code != 200:
                    content = await _start_of(response)
                    raise self._error(response.status_code, response.headers, content)
                async with contextlib.aclosing(self._events(response)) as events:
                    async for event in events:
                        usage = event.usage or usage
                        for choice in event.choices:
                            reason = choice.finish_reason or reason
                            ids, text = self._piece(choice)
                            if not ids and not text:
                                continue
                            count += len(ids)
                            so_far = None
                            if not first_at:
                                first_at = time.monotonic()
                                phases["engine_first_token_time"] = first_at - started
                                so_far = self._report("", len(tokens), 0, phases)
                            elif count > 1:
                                per_token_s = (time.monotonic() - first_at) / (count - 1)
                                phases["per_token_decode_time"] = per_token_s
                            ours.queued_tokens, ours.is_decoding = 0, True
                            ours.context_tokens = len(tokens) + count
                            yield m.GenerateChunk(ids, so_far, text)
            if not reason:
                raise Unavailable(f"{self.entry.worker_id} ended the stream without a result")
            cached = min(usage.cached, len(tokens))
            if first_at:
                phases |= self._prefilled(len(tokens) - cached, first_at - started, is_alone)
            if count > 1:
                self._tpot_s = smoothed(self._tpot_s, phases["per_token_decode_time"])
        yield self._report(reason, len(tokens), cached, phases)

    async def _events(self, response: httpx.Response) -> AsyncGenerator[_Completion, None]:
        async for line in response.aiter_lines():
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                return
            if line.startswith("data:"):
                yield self._read(data.encode())
        raise Unavailable(f"{self.entry.worker_id} closed the connection before the stream ended")

    def _piece(self, choice: _Choice) -> tuple[list[int], str | None]:
        """The token ids of a choice, and its text if the ids do not give it."""
        if choice.token_ids is not None:
            return choice.token_ids, None if self._encode else choice.text
        if choice.text and self._encode is None:
            raise EngineFailed(
                f"{self.entry.worker_id} returns no token ids, and this conductor has no tokenizer",
                hint="set conductor.model_path, or use a server that supports return_token_ids",
            )
        return self._encode(choice.text) if self._encode else [], choice.text

    def _body(
        self, tokens: list[int], max_tokens: int, fields: Mapping[str, Any]
    ) -> dict[str, Any]:
        return {
            **fields,
            "model": self.entry.served_model or self.entry.model,
            "prompt": tokens,
            "max_tokens": max_tokens,
            "return_token_ids": True,
        }

    @staticmethod
    def _report(reason: str, tokens: int, cached: int, phases: dict[str, float]) -> m.GenerateReply:
        by_tier = {"engine": cached} if cached else {}
        return m.GenerateReply(
            *(reason, 0, cached, tokens - cached, "", dict(phases), {}, 0), tokens_by_tier=by_tier
        )

    def _prefilled(self, computed: int, seconds: float, is_alone: bool) -> dict[str, float]:
        """The phase of a prefill.

        Beside other requests, the time includes a wait of unknown length.
        """
        if not is_alone:
            return {"engine_prefill_with_wait": seconds}
        if computed >= self.entry.block_tokens:
            self._prefill_tokens_per_s = smoothed(self._prefill_tokens_per_s, computed / seconds)
        return {"prefill_compute_time": seconds}

    # ------------------------------------------------------------ health and load

    async def check(self, timeout_s: float) -> int:
        """Check that the server can serve the model.

        Returns:
            The context length that it reports; 0 if it reports none.

        Raises:
            Unavailable, DeadlineExceeded: it cannot.
        """
        try:
            async with asyncio.timeout(timeout_s):
                with _typed(self.entry):
                    health = await self._http.get("/health")
                    if health.status_code not in (200, 404, 405):
                        raise self._error(health.status_code, health.headers, health.content)
                    listed = await self._http.get("/v1/models")
                    if listed.status_code != 200:
                        raise self._error(listed.status_code, listed.headers, listed.content)
        except TimeoutError:
            raise DeadlineExceeded(
                f"{self.entry.worker_id} did not reply to its check within {timeout_s:g} s"
            ) from None
        try:
            models = msgspec.json.decode(listed.content, type=_Models).data
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Unavailable(f"{self.entry.worker_id} lists no models: {brief(error)}") from None
        wanted = self.entry.served_model or self.entry.model
        for model in models:
            if model.id == wanted:
                return model.max_model_len or 0
        served = brief(", ".join(model.id for model in models))
        raise Unavailable(
            f"{self.entry.worker_id} does not serve {wanted}", hint=f"it serves {served}"
        )

    async def load(self, timeout_s: float) -> m.WorkerLoad:
        """The server's load: this conductor's requests, and what the server's own metrics add.

        Raises nothing. Without metrics only this conductor's requests count.
        """
        running = waiting = 0
        with contextlib.suppress(TimeoutError, httpx.HTTPError):
            async with asyncio.timeout(timeout_s):
                response = await self._http.get("/metrics")
            if response.status_code == 200:
                running = _sum_of(_RUNNING, response.text)
                waiting = _sum_of(_WAITING, response.text)
        ours = list(self._requests)
        decoding = [request for request in ours if request.is_decoding]
        others = max(0, running + waiting - len(ours))
        others_queued = min(others, waiting)
        mean_context = self._mean_prompt
        others_decoding = others - others_queued
        return m.WorkerLoad(
            len(ours) + others,
            sum(request.queued_tokens for request in ours) + int(others_queued * self._mean_prompt),
            len(decoding) + others_decoding,
            sum(request.context_tokens for request in decoding)
            + int(others_decoding * mean_context),
            self._prefill_tokens_per_s,
            self._tpot_s,
            0.0,
            self.entry.max_concurrent,
        )

    @contextlib.contextmanager
    def _working(self, tokens: int) -> Iterator[tuple[_Request, bool]]:
        """Count a request while the body runs.

        The flag says that it was the only one at its start.
        """
        request = _Request(tokens)
        is_alone = not self._requests
        self._mean_prompt = smoothed(self._mean_prompt, tokens)
        self._requests.add(request)
        try:
            yield request, is_alone
        finally:
            self._requests.discard(request)

    # ------------------------------------------------------------ reading responses

    def _read(self, content: bytes) -> _Completion:
        try:
            completion = msgspec.json.decode(content, type=_Completion)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise EngineFailed(
                f"{self.entry.worker_id} sent an invalid completion: {brief(error)}"
            ) from None
        if completion.error is not None:
            raise EngineFailed(f"{self.entry.worker_id}: {_message(completion.error)}")
        return completion

    def _error(self, status: int, headers: httpx.Headers, content: bytes) -> KvpoolError:
        try:
            message = _message(msgspec.json.decode(content))
        except (msgspec.DecodeError, UnicodeDecodeError):
            message = brief(content[:200].decode("utf-8", "replace"))
        text = f"{self.entry.worker_id} returned status {status}: {message}"
        if status in (401, 403):
            return Unavailable(text, hint="check api_key in conductor.engines")
        if status == 429:
            after = headers.get("Retry-After", "")
            return Overloaded(text, retry_after_s=float(after) if after.isdecimal() else 1.0)
        if status in (400, 413, 422):
            return InvalidArgument(text)
        return EngineFailed(text) if status == 500 else Unavailable(text)


@contextlib.contextmanager
def _typed(entry: EngineServer) -> Iterator[None]:
    """Convert httpx's errors to kvpool's."""
    try:
        yield
    except httpx.HTTPError as error:
        what = str(error) or type(error).__name__
        raise Unavailable(f"{entry.worker_id} at {entry.base_url}: {what}") from error


async def _start_of(response: httpx.Response) -> bytes:
    content = b""
    async for piece in response.aiter_bytes():
        content += piece
        if len(content) >= MAX_ERROR_BYTES:
            break
    return content[:MAX_ERROR_BYTES]


def _tokens(packed: bytes) -> list[int]:
    tokens: list[int] = np.frombuffer(packed, dtype="<u4").tolist()
    return tokens


def _named(request_id: str) -> dict[str, str]:
    return {"X-Request-Id": request_id}


def _message(document: Any) -> str:
    """The text of an error, in OpenAI's format or in vLLM's older one."""
    if isinstance(document, dict):
        inner = document.get("error", document)
        document = inner.get("message", inner) if isinstance(inner, dict) else inner
    return brief(document)


def _sum_of(pattern: re.Pattern[str], text: str) -> int:
    total = 0.0
    for value in pattern.findall(text):
        with contextlib.suppress(ValueError):
            total += float(value)
    return int(total) if 0 <= total < 1e9 else 0
