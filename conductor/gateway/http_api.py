"""The conductor's HTTP face: the OpenAI-compatible gateway and the pool's own routes."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from prometheus_client import CollectorRegistry

from conductor.cluster.cluster import Cluster
from conductor.gateway.admission_queue import priority_of
from conductor.gateway.gateway import Gateway
from conductor.gateway.metrics import RequestMetrics
from conductor.gateway.openai_schema import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    PrefetchRequest,
    read_prompt,
    read_request,
)
from conductor.gateway.prefetch import report as prefetch_report
from conductor.gateway.request import Job, Result, check_prompt
from conductor.gateway.request_log import RequestLog
from conductor.gateway.response import Answer, EventResponse, unless_left
from conductor.gateway.tokenizer import Tokenizer
from conductor.members.membership import State
from conductor.roles.actuator import RoleActuator
from kvpool.blocks.hashing import hash_chain
from kvpool.config.loader import ConductorConfig
from kvpool.errors import InvalidArgument, KvpoolError, NotFound, Unavailable, brief
from kvpool.security.authorization import CALLER, Gate
from kvpool.serving.http import base_app, error_response
from kvpool.serving.openapi import EVENTS, OBJECT, add_bodies, answers
from kvpool.wire import messages as m
from kvpool.wire.json_view import named

DEFAULT_MAX_TOKENS = 128
MAX_KEY_CHARS = 512
KEY_HEADER = "x-kvpool-key"
STREAMED = answers(application_json=OBJECT, text_event_stream=EVENTS)
MAX_LISTED = 1000  # records of requests in one answer
NO_WORKER = (
    "start one: kvpool worker; what keeps conductor.engines away stands in the conductor's log"
)
CLIENT_LEFT = 499  # nginx's status for it; nobody reads it


class HttpApi:
    """Routes over a gateway.

    Args:
        tokenizer: None where no model is configured; then prompts must come as token ids.
        gate: looks at the token of every request; default: everybody may do everything.
    """

    def __init__(
        self,
        config: ConductorConfig,
        cluster: Cluster,
        gateway: Gateway,
        request_log: RequestLog,
        tokenizer: Tokenizer | None,
        metrics: RequestMetrics,
        roles: RoleActuator,
        gate: Gate | None = None,
    ) -> None:
        self._gate = gate
        self._config = config
        self._cluster = cluster
        self._gateway = gateway
        self._request_log = request_log
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._roles = roles

    def app(self, registry: CollectorRegistry, not_ready: Callable[[], str]) -> FastAPI:
        """The FastAPI application."""
        app = base_app(
            "kvpool conductor",
            registry,
            not_ready,
            max_body_bytes=self._config.max_body_bytes,
            notice=self._cluster.notice,
            gate=self._gate,
        )

        schemas = add_bodies(app, ChatRequest, CompletionRequest, PrefetchRequest)

        @app.post("/v1/chat/completions", responses=STREAMED, openapi_extra=schemas[ChatRequest])
        async def chat(request: Request) -> Response:
            body = read_request(await request.body(), ChatRequest)
            prompt = await self._chat_tokens(body.messages)
            limit = body.max_completion_tokens or body.max_tokens
            return await self._serve(body, prompt, limit, request)

        @app.post("/v1/completions", responses=STREAMED, openapi_extra=schemas[CompletionRequest])
        async def completions(request: Request) -> Response:
            body = read_request(await request.body(), CompletionRequest)
            prompt = await self._prompt_tokens(body.prompt)
            return await self._serve(body, prompt, body.max_tokens, request)

        @app.post(
            "/v1/prefetch",
            responses=answers(application_json=OBJECT),
            openapi_extra=schemas[PrefetchRequest],
        )
        async def prefetch(request: Request) -> Response:
            """Begin to move blocks toward the worker that would serve what is about to come."""
            body = read_request(await request.body(), PrefetchRequest)
            return _json(await self._prefetch(body, request))

        @app.get("/v1/models")
        async def models() -> dict[str, Any]:
            names = sorted({w.descriptor.model for w in self._cluster.workers_of(CALLER.get())})
            data = [
                {"id": name, "object": "model", "created": 0, "owned_by": "kvpool"}
                for name in names
            ]
            return {"object": "list", "data": data}

        @app.get("/v1/stats", responses=answers(application_json=OBJECT))
        async def stats() -> Response:
            return _json(named(self._cluster.stats_for(CALLER.get())))

        @app.get("/v1/scaling", responses=answers(application_json=OBJECT))
        async def scaling() -> Response:
            """Instances by role, how many there should be and why; for a HPA or KEDA."""
            return _json(self._roles.advice())

        @app.get("/v1/nodes", responses=answers(application_json=OBJECT))
        async def nodes() -> Response:
            return _json(named(self._cluster.node_list(CALLER.get())))

        @app.get("/v1/requests", responses=answers(application_json=OBJECT))
        async def last_requests(limit: int = 20) -> Response:
            if not 1 <= limit <= MAX_LISTED:
                raise InvalidArgument(f"limit is {limit}", hint=f"1 to {MAX_LISTED}")
            caller = CALLER.get()
            tenant = None if caller.sees_all else caller.tenant
            return _json({"requests": self._request_log.recent(limit, tenant)})

        @app.get("/v1/requests/{request_id}", responses=answers(application_json=OBJECT))
        async def explain(request_id: str) -> Response:
            record = self._request_log.get(request_id)
            caller = CALLER.get()
            if record is None or not (caller.sees_all or record.tenant == caller.tenant):
                raise NotFound(
                    f"request {brief(request_id)!r} is not among the last ones decided here"
                )
            return _json(record)

        @app.get("/", response_class=HTMLResponse)
        async def page() -> str:
            return _PAGE

        return app

    async def _chat_tokens(self, messages: Sequence[ChatMessage]) -> list[int]:
        if self._tokenizer is None:
            raise no_tokenizer()
        plain = [message.plain() for message in messages]
        return await asyncio.to_thread(self._tokenizer.encode_chat, plain)

    async def _prompt_tokens(self, raw: msgspec.Raw) -> list[int]:
        prompt = read_prompt(raw, self._config.max_prompt_tokens)
        if not isinstance(prompt, str):
            return prompt
        if self._tokenizer is None:
            raise no_tokenizer()
        return await asyncio.to_thread(self._tokenizer.encode, prompt)

    async def _prefetch(self, body: PrefetchRequest, request: Request) -> dict[str, Any]:
        given = body.given()
        key = body.key or (request.headers.get(KEY_HEADER, "")[:MAX_KEY_CHARS] if not given else "")
        if len(given) > 1 or not (given or key):
            raise InvalidArgument("name one of key, messages and prompt")
        namespace = self._worker_for(body.model).namespace
        if key:
            now = self._cluster.clock()
            hashes = self._gateway.sessions.get(namespace.namespace_id, key, now)
            if not hashes:
                raise NotFound(f"nothing is remembered of session {brief(key)!r}")
        else:
            tokens = await (
                self._chat_tokens(body.messages)
                if body.messages
                else self._prompt_tokens(body.prompt)
            )
            check_prompt(tokens, self._config.max_prompt_tokens, 0, len(tokens))
            hashes = hash_chain(namespace, tokens)
        return prefetch_report(await self._gateway.prefetcher.hint(namespace, hashes))

    async def _serve(
        self,
        body: ChatRequest | CompletionRequest,
        prompt: list[int],
        max_tokens: int | None,
        request: Request,
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
            model=worker.model,
            endpoint=request.url.path,
            key=request.headers.get(KEY_HEADER, "")[:MAX_KEY_CHARS] or body.user,
            priority=priority_of(
                options.priority,
                worker.namespace.tenant,
                self._config.tenant_priorities,
                self._config.default_priority,
            ),
            received_at=received_at,
        )
        result = Result()
        is_handed_on = False
        try:
            if await unless_left(request, self._gateway.admit(job, result)) is None:
                return Response(status_code=CLIENT_LEFT)
            answer = Answer(
                self._gateway,
                self._metrics,
                self._tokenizer,
                body,
                job,
                result,
                worker.model,
                received_at,
            )
            headers = answer.headers()
            if body.stream:
                is_handed_on = True
                return EventResponse(answer.events(), headers, lambda: self._gateway.release(job))
            document = await unless_left(request, answer.whole())
        except KvpoolError as error:
            refusal = error_response(error)
            refusal.headers["X-Request-Id"] = request_id  # for `kvpool explain`
            return refusal
        finally:
            if not is_handed_on:
                self._gateway.release(job)
        if document is None:
            return Response(status_code=CLIENT_LEFT)
        return JSONResponse(document, headers=headers)

    def _worker_for(self, model: str) -> m.WorkerDescriptor:
        members = self._cluster.workers_of(CALLER.get())
        members.sort(key=lambda worker: worker.state is not State.LIVE)  # who works now comes first
        workers = [worker.descriptor for worker in members]
        if not workers:
            raise Unavailable("no worker has joined yet", hint=NO_WORKER)
        for worker in workers:
            if not model or worker.model == model:
                return worker
        served = ", ".join(sorted({worker.model for worker in workers}))
        raise NotFound(f"model {brief(model)!r} is not served here", hint=f"served: {served}")


def no_tokenizer() -> Unavailable:
    """What a conductor says that was started without a model's directory."""
    return Unavailable(
        "this conductor has no tokenizer",
        hint="set conductor.model_path, or send token ids to /v1/completions",
    )


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
let token=sessionStorage.getItem("token");
async function stats(){const r=await fetch("/v1/stats",{headers:token?{Authorization:"Bearer "+token}:{}});
if(r.status!=401)return r.json();
token=prompt("Token");if(!token)throw "no token";sessionStorage.setItem("token",token);return stats()}
async function show(){const s=await stats();
let h="<h2>Nodes</h2><table><tr><th>node<th>host<th>state<th>tier<th>blocks<th>used<th>size</tr>";
for(const n of s.nodes)for(const t of n.tiers)h+=row([n.node_id.slice(0,8),n.host,
s.node_states[n.node_id]||"gone",t.tier,t.blocks,mib(t.capacity_bytes-t.free_bytes),mib(t.capacity_bytes)]);
h+="</table><h2>Workers</h2><table><tr><th>worker<th>role<th>host<th>state<th>running</tr>";
for(const w of s.workers)h+=row([w.descriptor.worker_id.slice(0,8),w.descriptor.role,w.descriptor.host,
w.state,w.load.running]);
h+="</table><h2>Counters</h2><table>"+Object.entries(s.counters).map(e=>row(e)).join("")+"</table>";
document.getElementById("s").innerHTML=h}
(async()=>{for(;;){await show();await new Promise(r=>setTimeout(r,2000))}})()</script>"""
