"""The conductor's HTTP face: the OpenAI-compatible gateway and the pool's own routes."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from prometheus_client import CollectorRegistry

from conductor.cluster import Cluster
from conductor.gateway import Gateway, Job, Result, check_prompt
from conductor.metrics import RequestMetrics
from conductor.openai_api import ChatRequest, CompletionRequest, Shape, usage
from conductor.requests import RequestLog
from conductor.tokenizer import TextStream, Tokenizer
from kvpool.config import ConductorConfig
from kvpool.errors import InvalidArgument, KvpoolError, NotFound, Unavailable
from kvpool.http import base_app, error_response
from kvpool.wire import messages as m
from kvpool.wire.plain import named

DEFAULT_MAX_TOKENS = 128


class HttpApi:
    """Routes over a gateway.

    Args:
        tokenizer: None where no model is configured; then prompts must come as token ids.
    """

    def __init__(
        self,
        config: ConductorConfig,
        cluster: Cluster,
        gateway: Gateway,
        request_log: RequestLog,
        tokenizer: Tokenizer | None,
        metrics: RequestMetrics,
    ) -> None:
        self._config = config
        self._cluster = cluster
        self._gateway = gateway
        self._request_log = request_log
        self._tokenizer = tokenizer
        self._metrics = metrics

    def app(self, registry: CollectorRegistry, not_ready: Callable[[], str]) -> FastAPI:
        """The FastAPI application."""
        app = base_app(
            "kvpool conductor", registry, not_ready, max_body_bytes=self._config.max_body_bytes
        )

        @app.post("/v1/chat/completions", response_model=None)
        async def chat(body: ChatRequest, request: Request) -> Response:
            if self._tokenizer is None:
                raise _no_tokenizer()
            messages = [message.plain() for message in body.messages]
            prompt = await asyncio.to_thread(self._tokenizer.encode_chat, messages)
            limit = body.max_completion_tokens or body.max_tokens
            return await self._serve(body, prompt, limit, request, is_chat=True)

        @app.post("/v1/completions", response_model=None)
        async def completions(body: CompletionRequest, request: Request) -> Response:
            prompt = await self._plain_prompt(body.prompt)
            return await self._serve(body, prompt, body.max_tokens, request, is_chat=False)

        @app.get("/v1/models")
        async def models() -> dict[str, Any]:
            names = sorted({w.descriptor.model for w in self._cluster.workers})
            data = [
                {"id": name, "object": "model", "created": 0, "owned_by": "kvpool"}
                for name in names
            ]
            return {"object": "list", "data": data}

        @app.get("/v1/stats")
        async def stats() -> Response:
            return _json(named(self._cluster.stats()))

        @app.get("/v1/nodes")
        async def nodes() -> Response:
            return _json(named(self._cluster.node_list()))

        @app.get("/v1/requests/{request_id}")
        async def explain(request_id: str) -> Response:
            record = self._request_log.get(request_id)
            if record is None:
                raise NotFound(f"request {request_id!r} is not among the last ones decided here")
            return _json(record)

        @app.get("/", response_class=HTMLResponse)
        async def page() -> str:
            return _PAGE

        return app

    async def _plain_prompt(self, prompt: str | list[int] | list[str]) -> list[int]:
        if isinstance(prompt, list) and all(isinstance(item, int) for item in prompt):
            return [int(item) for item in prompt]
        if isinstance(prompt, list):
            if len(prompt) != 1:
                raise InvalidArgument(f"{len(prompt)} prompts in one request", hint="send one")
            prompt = str(prompt[0])
        if self._tokenizer is None:
            raise _no_tokenizer()
        return await asyncio.to_thread(self._tokenizer.encode, prompt)

    async def _serve(
        self,
        body: ChatRequest | CompletionRequest,
        prompt: list[int],
        max_tokens: int | None,
        request: Request,
        *,
        is_chat: bool,
    ) -> Response:
        received_at = time.monotonic()
        worker = self._worker_for(body.model)
        request_id = uuid.uuid4().hex
        limit = worker.max_model_tokens
        wanted = max_tokens or min(DEFAULT_MAX_TOKENS, max(1, limit - len(prompt)))
        if wanted > self._config.max_output_tokens:
            raise InvalidArgument(
                f"max_tokens is {wanted}",
                hint=f"the limit here is {self._config.max_output_tokens}",
            )
        check_prompt(prompt, self._config.max_prompt_tokens, wanted, limit)
        options = body.kvpool
        job = Job(
            request_id,
            worker.namespace,
            prompt,
            m.Sampling(
                wanted,
                body.temperature,
                body.top_p,
                (body.seed or 0) & 0x7FFF_FFFF,
                body.ignore_eos,
            ),
            received_at + self._config.request_timeout_s,
            options.pool,
            options.prefill,
            options.decode_worker,
            options.local_prefix_tokens,
        )
        result = Result()
        self._gateway.admit(job, result)
        answer = _Answer(self, body, job, result, worker.model, received_at, is_chat=is_chat)
        headers = answer.headers()
        if body.stream:
            return StreamingResponse(
                answer.events(), media_type="text/event-stream", headers=headers
            )
        return JSONResponse(await answer.whole(request), headers=headers)

    def _worker_for(self, model: str) -> m.WorkerDescriptor:
        workers = [worker.descriptor for worker in self._cluster.workers]
        if not workers:
            raise Unavailable("no worker has joined yet", hint="start one: kvpool worker")
        for worker in workers:
            if not model or worker.model == model:
                return worker
        served = ", ".join(sorted({worker.model for worker in workers}))
        raise NotFound(f"model {model!r} is not served here", hint=f"served: {served}")


class _Answer:
    """Turns the tokens of one job into a response."""

    def __init__(
        self,
        api: HttpApi,
        body: ChatRequest | CompletionRequest,
        job: Job,
        result: Result,
        model: str,
        received_at: float,
        *,
        is_chat: bool,
    ) -> None:
        self._api = api
        self._job = job
        self._result = result
        self._received_at = received_at
        self._shape = Shape(job.request_id, model, is_chat=is_chat)
        self._text = TextStream(api._tokenizer) if api._tokenizer is not None else None
        self._stops = body.stops()
        self._with_ids = body.kvpool.return_token_ids
        self._with_usage = bool((body.stream_options or {}).get("include_usage"))

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
        }

    async def events(self) -> AsyncIterator[str]:
        """Server-sent events. Closing the iterator cancels everything down to the reservations."""
        is_first = True
        finish = None
        try:
            async for text, is_stopped in self._pieces():
                if text or is_first:
                    yield _event(self._shape.chunk(text, None, is_first=is_first))
                    is_first = False
                if is_stopped:
                    finish = "stop"
                    break
        except KvpoolError as error:
            yield f"data: {bytes(error_response(error).body).decode()}\n\n"
            yield "data: [DONE]\n\n"
            return
        yield _event(self._shape.chunk("", finish or self._result.finish_reason, is_first=is_first))
        last = self._shape.usage_chunk(self._usage())
        if self._with_usage or self._with_ids:
            yield _event({**last, "kvpool": self._report()})
        yield "data: [DONE]\n\n"

    async def whole(self, request: Request) -> dict[str, Any]:
        """The complete response."""
        text, finish = "", None
        async for piece, is_stopped in self._pieces():
            text += piece
            if is_stopped:
                finish = "stop"
                break
            if await request.is_disconnected():
                break
        reason = finish or self._result.finish_reason or "stop"
        return {
            **self._shape.whole(text, reason, self._usage()),
            "kvpool": self._report(),
        }

    async def _pieces(self) -> AsyncIterator[tuple[str, bool]]:
        """Text as it becomes certain; True with the piece that a stop string ended."""
        held = ""
        keep = max((len(stop) for stop in self._stops), default=1) - 1
        run = self._api._gateway.run(self._job, self._result, self._received_at)
        try:
            async for ids in run:
                held += self._text.push(ids) if self._text else ""
                at = min((i for s in self._stops if (i := held.find(s)) >= 0), default=-1)
                if at >= 0:
                    yield held[:at], True
                    return
                cut = len(held) - keep
                # The first token is announced even when its text is still held back.
                yield held[: max(0, cut)], False
                held = held[max(0, cut) :]
            yield held + (self._text.finish() if self._text else ""), False
        finally:
            await run.aclose()
            self._api._metrics.observe(self._result)

    def _usage(self) -> dict[str, Any]:
        result = self._result
        cached = max(result.pool_tokens, result.prefill_reused_tokens, result.local_tokens)
        return usage(len(self._job.prompt), len(result.token_ids), cached)

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
            "bytes_read": result.bytes_read,
            "bytes_written": result.bytes_written,
            "verified_blocks": result.verified_blocks,
            "fallback_reason": result.fallback_reason,
        }
        if self._with_ids:
            report["token_ids"] = result.token_ids
            report["prompt_tokens"] = len(self._job.prompt)
        return report


def _no_tokenizer() -> Unavailable:
    return Unavailable(
        "this conductor has no tokenizer",
        hint="set conductor.model_path, or send token ids to /v1/completions",
    )


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, separators=(',', ':'))}\n\n"


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


_PAGE = """<!doctype html><meta charset="utf-8"><title>kvpool</title>
<style>body{font:15px system-ui;margin:2rem;max-width:70rem}table{border-collapse:collapse;margin:1rem 0}
td,th{padding:.3rem .8rem;border-bottom:1px solid #ddd;text-align:left}code{background:#f4f4f4}</style>
<h1>kvpool</h1><p>Routes: <a href="/docs">API</a>, <a href="/metrics">metrics</a>,
<a href="/v1/stats">stats</a>, <a href="/v1/nodes">nodes</a>.</p><div id="s">loading</div>
<script>
const esc=t=>String(t).replace(/[&<>"]/g,c=>({"&":"&amp;","<":"&lt;",">":"&gt;",'"':"&quot;"}[c]));
const row=c=>"<tr>"+c.map(x=>"<td>"+esc(x)+"</td>").join("")+"</tr>";
const mib=b=>(b/1048576).toFixed(0)+" MiB";
async function show(){const s=await (await fetch("/v1/stats")).json();
let h="<h2>Nodes</h2><table><tr><th>node<th>host<th>state<th>tier<th>blocks<th>used<th>size</tr>";
for(const n of s.nodes)for(const t of n.tiers)h+=row([n.node_id.slice(0,8),n.host,
s.node_states[n.node_id]||"gone",t.tier,t.blocks,mib(t.capacity_bytes-t.free_bytes),mib(t.capacity_bytes)]);
h+="</table><h2>Workers</h2><table><tr><th>worker<th>role<th>host<th>state<th>running</tr>";
for(const w of s.workers)h+=row([w.descriptor.worker_id.slice(0,8),w.descriptor.role,w.descriptor.host,
w.state,w.load.running]);
h+="</table><h2>Counters</h2><table>"+Object.entries(s.counters).map(e=>row(e)).join("")+"</table>";
document.getElementById("s").innerHTML=h}
show();setInterval(show,2000)</script>"""
