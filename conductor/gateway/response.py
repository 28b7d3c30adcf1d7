"""The response to one request: text, streamed or whole, and a report on what the pool did."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import asdict
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from conductor.gateway.metrics import RequestMetrics
from conductor.gateway.openai_schema import ChatRequest, CompletionRequest, ResponseFormat, usage
from conductor.gateway.runner import RequestRun
from conductor.gateway.stop_strings import StopStrings
from conductor.gateway.tokenizer import TextStream, Tokenizer
from kvpool.errors import KvpoolError
from kvpool.serving.http import error_response
from kvpool.wire import messages as m

T = TypeVar("T")


class CompletionResponse:
    """Turns the tokens of one admitted request into a response.

    Args:
        tokenizer: None if the response has token ids and no text.
    """

    def __init__(
        self,
        run: RequestRun,
        metrics: RequestMetrics,
        tokenizer: Tokenizer | None,
        body: ChatRequest | CompletionRequest,
    ) -> None:
        self._run = run
        self._lifecycle = run.lifecycle
        self._metrics = metrics
        self._format = ResponseFormat(
            run.request.request_id,
            run.request.facts.model,
            is_chat=isinstance(body, ChatRequest),
        )
        self._text = TextStream(tokenizer) if tokenizer is not None else None
        self._stop_strings = StopStrings(body.stop_strings())
        self._with_ids = body.options.return_token_ids
        self._with_usage = body.wants_usage()

    def headers(self) -> dict[str, str]:
        """Headers that describe the decision."""
        plan = self._lifecycle.plan
        assert plan is not None
        decision = plan.decision
        return {
            "X-Request-Id": decision.request_id,
            "X-Kvpool-Mode": decision.mode,
            "X-Kvpool-Prefill": decision.prefills_on or "",
            "X-Kvpool-Decode": decision.decode or "",
            "X-Kvpool-Planned-Reuse-Blocks": str(decision.reuse_blocks),
            "X-Kvpool-Routing": plan.routing,
        }

    async def events(self) -> AsyncGenerator[str, None]:
        """Stream server-sent events.

        Closing the iterator cancels the request and its reservations.
        """
        is_first = True
        try:
            async with contextlib.aclosing(self._pieces()) as pieces:
                async for text in pieces:
                    if text or is_first:
                        yield _event(self._format.chunk(text, None, is_first=is_first))
                        is_first = False
        except KvpoolError as error:
            yield f"data: {bytes(error_response(error).body).decode()}\n\n"
            yield "data: [DONE]\n\n"
            return
        yield _event(self._format.chunk("", self._finish_reason, is_first=is_first))
        last = self._format.usage_chunk(self._usage())
        if self._with_usage or self._with_ids:
            yield _event({**last, "kvpool": self._report()})
        yield "data: [DONE]\n\n"

    async def document(self) -> dict[str, Any]:
        """Wait for the complete response."""
        text = ""
        async with contextlib.aclosing(self._pieces()) as pieces:
            async for piece in pieces:
                text += piece
        reason = self._finish_reason or "stop"
        return {**self._format.document(text, reason, self._usage()), "kvpool": self._report()}

    @property
    def _finish_reason(self) -> str:
        return "stop" if self._stop_strings.is_stopped else self._lifecycle.finish_reason

    async def _pieces(self) -> AsyncGenerator[str, None]:
        """Stream the text as it becomes certain, up to the first stop string.

        A piece may be empty: the first token is sent even while its text is held back.
        """
        try:
            while (chunk := await self._run.next_item()) is not None:
                piece = self._stop_strings.push(self._text_of(chunk))
                if self._stop_strings.is_stopped:
                    self._run.complete()
                    yield piece
                    return
                yield piece
            yield self._stop_strings.finish(self._text.finish() if self._text else "")
        finally:
            await self._run.close()
            self._metrics.observe(self._lifecycle)

    def _text_of(self, chunk: m.GenerateChunk) -> str:
        """The text that became certain, detokenized here or by the engine."""
        if self._text is None:
            return chunk.text or ""
        if chunk.text is None:
            return self._text.push(chunk.token_ids)
        held = self._text.finish()
        self._text.skip(chunk.token_ids)
        return held + chunk.text

    def _usage(self) -> dict[str, Any]:
        measured = self._lifecycle.measured
        prompt_tokens = len(self._run.request.prompt)
        return usage(prompt_tokens, measured.output_tokens, measured.reused_tokens)

    def _report(self) -> dict[str, Any]:
        """Report what the pool did for this request."""
        lifecycle, measured = self._lifecycle, self._lifecycle.measured
        decision = lifecycle.decision
        report: dict[str, Any] = {
            "request_id": self._run.request.request_id,
            "mode": decision.mode if decision else "",
            "prefill_worker": decision.prefills_on if decision else "",
            "decode_worker": decision.decode if decision else "",
            "pool_tokens": measured.pool_tokens,
            "prefill_reused_tokens": measured.prefill_reused_tokens,
            "local_tokens": measured.local_tokens,
            "computed_tokens": measured.computed_tokens,
            "ttft_s": measured.ttft_s,
            "tpot_s": measured.tpot_s,
            "phases": measured.phases,
            "tokens_by_tier": measured.tokens_by_tier,
            "bytes_read": measured.bytes_read,
            "bytes_written": measured.bytes_written,
            "verified_blocks": measured.verified_blocks,
            "fallback_reason": lifecycle.fallback_reason,
            "misses": [asdict(miss) for miss in measured.misses],
        }
        if self._with_ids:
            report["token_ids"] = lifecycle.token_ids
            report["prompt_tokens"] = len(self._run.request.prompt)
        return report


class EventStreamResponse(StreamingResponse):
    """A stream of events that closes its generator as soon as the client disconnects.

    `on_end` is always called, also if the stream never started.
    """

    def __init__(
        self,
        events: AsyncGenerator[str, None],
        headers: dict[str, str],
        on_end: Callable[[], None],
    ) -> None:
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._events = events
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with contextlib.aclosing(self._events):
                await super().__call__(scope, receive, send)
        finally:
            self._on_end()


async def unless_disconnected(http_request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of `work`. If the client disconnects first, cancel it and return None.

    Call it after the request's body was read: it consumes the server's next messages.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(http_request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        task.cancel()
        gone.cancel()
        # Wait until the cancellation has reached the worker.
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(http_request: Request) -> None:
    while (await http_request.receive())["type"] != "http.disconnect":
        pass


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, separators=(',', ':'))}\n\n"
