"""The answer to one request: its tokens as text, streamed or whole, with what the pool did for it."""

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

from conductor.gateway.gateway import Gateway
from conductor.gateway.metrics import RequestMetrics
from conductor.gateway.openai_schema import ChatRequest, CompletionRequest, Shape, usage
from conductor.gateway.request import Job, Result
from conductor.gateway.stop_strings import StopText
from conductor.gateway.tokenizer import TextStream, Tokenizer
from kvpool.errors import KvpoolError
from kvpool.serving.http import error_response
from kvpool.wire import messages as m

T = TypeVar("T")


class Answer:
    """Turns the tokens of one admitted job into a response.

    Args:
        tokenizer: None: the answer has token ids and no text.
        received_at: when the request came, in monotonic seconds.
    """

    def __init__(
        self,
        gateway: Gateway,
        metrics: RequestMetrics,
        tokenizer: Tokenizer | None,
        body: ChatRequest | CompletionRequest,
        job: Job,
        result: Result,
        model: str,
        received_at: float,
    ) -> None:
        self._gateway = gateway
        self._metrics = metrics
        self._job = job
        self._result = result
        self._received_at = received_at
        self._shape = Shape(job.request_id, model, is_chat=isinstance(body, ChatRequest))
        self._text = TextStream(tokenizer) if tokenizer is not None else None
        self._stops = StopText(body.stops())
        self._with_ids = body.kvpool.return_token_ids
        self._with_usage = body.wants_usage()

    def headers(self) -> dict[str, str]:
        """The decision, for whoever wants to know."""
        decision = self._result.decision
        assert decision is not None
        return {
            "X-Request-Id": self._job.request_id,
            "X-Kvpool-Mode": decision.mode,
            "X-Kvpool-Prefill": decision.prefills_on or "",
            "X-Kvpool-Decode": decision.decode or "",
            "X-Kvpool-Planned-Reuse-Blocks": str(decision.reuse_blocks),
            "X-Kvpool-Routing": self._job.routing,
        }

    async def events(self) -> AsyncGenerator[str, None]:
        """Server-sent events. Closing the iterator cancels everything down to the reservations."""
        is_first = True
        try:
            async with contextlib.aclosing(self._pieces()) as pieces:
                async for text in pieces:
                    if text or is_first:
                        yield _event(self._shape.chunk(text, None, is_first=is_first))
                        is_first = False
        except KvpoolError as error:
            yield f"data: {bytes(error_response(error).body).decode()}\n\n"
            yield "data: [DONE]\n\n"
            return
        yield _event(self._shape.chunk("", self._result.finish_reason, is_first=is_first))
        last = self._shape.usage_chunk(self._usage())
        if self._with_usage or self._with_ids:
            yield _event({**last, "kvpool": self._report()})
        yield "data: [DONE]\n\n"

    async def whole(self) -> dict[str, Any]:
        """The complete response."""
        text = ""
        async with contextlib.aclosing(self._pieces()) as pieces:
            async for piece in pieces:
                text += piece
        reason = self._result.finish_reason or "stop"
        return {**self._shape.whole(text, reason, self._usage()), "kvpool": self._report()}

    async def _pieces(self) -> AsyncGenerator[str, None]:
        """Text as it becomes certain, up to the first stop string.

        A piece may be empty: the first token is announced even when its text is still held back.
        """
        run = self._gateway.run(self._job, self._result, self._received_at)
        try:
            async with contextlib.aclosing(run):
                async for chunk in run:
                    piece = self._stops.push(self._text_of(chunk))
                    if self._stops.is_stopped:
                        self._result.stop()
                    yield piece
                    if self._stops.is_stopped:
                        return
            piece = self._stops.finish(self._text.finish() if self._text else "")
            if self._stops.is_stopped:
                self._result.stop()
            yield piece
        finally:
            self._metrics.observe(self._result, len(self._job.prompt))

    def _text_of(self, chunk: m.GenerateChunk) -> str:
        """Text that became certain, made here or by the engine."""
        if self._text is None:
            return chunk.text or ""
        if chunk.text is None:
            return self._text.push(chunk.token_ids)
        held = self._text.finish()
        self._text.skip(chunk.token_ids)
        return held + chunk.text

    def _usage(self) -> dict[str, Any]:
        result = self._result
        return usage(len(self._job.prompt), len(result.token_ids), result.reused_tokens)

    def _report(self) -> dict[str, Any]:
        """What the pool did for this request."""
        result = self._result
        decision = result.decision
        report: dict[str, Any] = {
            "request_id": self._job.request_id,
            "mode": decision.mode if decision else "",
            "prefill_worker": decision.prefills_on if decision else "",
            "decode_worker": decision.decode if decision else "",
            "pool_tokens": result.pool_tokens,
            "prefill_reused_tokens": result.prefill_reused_tokens,
            "local_tokens": result.local_tokens,
            "computed_tokens": result.computed_tokens,
            "ttft_s": result.ttft_s,
            "tpot_s": result.tpot_s,
            "phases": result.phases,
            "tokens_by_tier": result.tokens_by_tier,
            "bytes_read": result.bytes_read,
            "bytes_written": result.bytes_written,
            "verified_blocks": result.verified_blocks,
            "fallback_reason": result.fallback_reason,
            "misses": [asdict(miss) for miss in result.misses],
        }
        if self._with_ids:
            report["token_ids"] = result.token_ids
            report["prompt_tokens"] = len(self._job.prompt)
        return report


class EventResponse(StreamingResponse):
    """A stream of events that is closed in order when its reader leaves, not when memory is tidied.

    `on_end` is called in any case, also when the stream never began.
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


async def unless_left(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`; None when the client left before, and `work` was cancelled.

    Call it when the request's body was read: it takes what the server says next.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        task.cancel()
        gone.cancel()
        # The worker is told before anybody thinks that the request is over.
        await asyncio.gather(task, gone, return_exceptions=True)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, separators=(',', ':'))}\n\n"
