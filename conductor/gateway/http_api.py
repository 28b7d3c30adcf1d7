"""The conductor's HTTP API: the OpenAI-compatible gateway and the pool's own routes."""

from __future__ import annotations

import asyncio
import secrets
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp, Receive, Scope, Send

from conductor.cluster.overview import PoolOverview
from conductor.engine_servers.discovery import is_engine_server
from conductor.gateway.body_fields import check_fields, other_fields
from conductor.gateway.gateway import Gateway
from conductor.gateway.metrics import RequestMetrics
from conductor.gateway.openai_schema import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    PoolOptions,
    PrefetchRequest,
    read_prompt,
    read_request,
)
from conductor.gateway.request import GenerationRequest, check_prompt
from conductor.gateway.response import CompletionResponse, EventStreamResponse, unless_disconnected
from conductor.gateway.tokenizer import Tokenizer
from conductor.members.membership import State
from conductor.requests import request as requests
from conductor.requests.admission_queue import priority_of
from conductor.requests.request_log import RequestLog
from conductor.roles.actuator import RoleActuator
from conductor.routing.rules import Facts
from kvpool.blocks.hashing import hash_chain
from kvpool.config.loader import ConductorConfig
from kvpool.config.settings import Objective
from kvpool.errors import InvalidArgument, KvpoolError, NotFound, Unavailable, brief
from kvpool.security.authorization import CALLER, Authorizer
from kvpool.serving.http import base_app, error_response
from kvpool.serving.openapi import EVENTS, OBJECT, add_bodies, responses
from kvpool.wire import messages as m
from kvpool.wire.json_view import named

DEFAULT_MAX_TOKENS = 128
MAX_KEY_CHARS = 512
MAX_SEED = 0x7FFF_FFFF
KEY_HEADER = "x-kvpool-key"
STREAMED = responses(application_json=OBJECT, text_event_stream=EVENTS)
MAX_LISTED = 1000  # records in one response
NO_WORKER = (
    "start one with kvpool worker; if conductor.engines is set, the conductor's log says why"
    " those engines have not joined"
)
MODES = {"auto": "", "remote": "disaggregated", "local": "local"}
NO_OBJECTIVE = Objective()
CLIENT_LEFT = 499  # nginx's status for a client that disconnected; nobody receives it


class HttpApi:
    """The HTTP routes of a conductor.

    Args:
        tokenizer: None without a configured model; prompts must then be token ids.
        authorizer: authorizes every request; None allows everything.
    """

    def __init__(
        self,
        config: ConductorConfig,
        overview: PoolOverview,
        gateway: Gateway,
        request_log: RequestLog,
        tokenizer: Tokenizer | None,
        metrics: RequestMetrics,
        roles: RoleActuator,
        authorizer: Authorizer | None = None,
    ) -> None:
        self._authorizer = authorizer
        self._config = config
        self._overview = overview
        self._gateway = gateway
        self._request_log = request_log
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._roles = roles

    def app(self, registry: CollectorRegistry, not_ready: Callable[[], str]) -> FastAPI:
        """Build the FastAPI application."""
        app = base_app(
            "kvpool conductor",
            registry,
            not_ready,
            max_body_bytes=self._config.advanced.max_body_bytes,
            notice=self._overview.notice,
            authorizer=self._authorizer,
        )
        # Outermost: reading the body counts.
        app.add_middleware(ArrivalClock, clock=self._gateway.clock)
        self._add_serving(app)
        self._add_views(app)
        return app

    def _add_serving(self, app: FastAPI) -> None:
        """Add the routes that serve requests or prepare for them."""
        schemas = add_bodies(app, ChatRequest, CompletionRequest, PrefetchRequest)

        @app.post("/v1/chat/completions", responses=STREAMED, openapi_extra=schemas[ChatRequest])
        async def chat(http_request: Request) -> Response:
            body = read_request(await http_request.body(), ChatRequest)
            prompt = await self._chat_tokens(body.messages, body.chat_template_kwargs)
            limit = body.max_completion_tokens or body.max_tokens
            return await self._serve(body, prompt, limit, http_request)

        @app.post("/v1/completions", responses=STREAMED, openapi_extra=schemas[CompletionRequest])
        async def completions(http_request: Request) -> Response:
            body = read_request(await http_request.body(), CompletionRequest)
            prompt = await self._prompt_tokens(body.prompt)
            return await self._serve(body, prompt, body.max_tokens, http_request)

        @app.post(
            "/v1/prefetch",
            responses=responses(application_json=OBJECT),
            openapi_extra=schemas[PrefetchRequest],
        )
        async def prefetch(http_request: Request) -> Response:
            """Start to move blocks toward the worker that would serve the announced request."""
            body = read_request(await http_request.body(), PrefetchRequest)
            return _json(await self._prefetch(body, http_request))

    def _add_views(self, app: FastAPI) -> None:
        """Add the routes that only show something."""
        page = (Path(__file__).parent / "static" / "index.html").read_text()

        @app.get("/v1/models")
        async def models() -> dict[str, Any]:
            names = sorted({w.descriptor.model for w in self._overview.workers_of(CALLER.get())})
            data = [
                {"id": name, "object": "model", "created": 0, "owned_by": "kvpool"}
                for name in names
            ]
            return {"object": "list", "data": data}

        @app.get("/v1/stats", responses=responses(application_json=OBJECT))
        async def stats() -> Response:
            return _json(named(self._overview.stats(CALLER.get())))

        @app.get("/v1/scaling", responses=responses(application_json=OBJECT))
        async def scaling() -> Response:
            """Instances by role, the advised number and the reason; for an HPA or KEDA."""
            return _json(self._roles.advice())

        @app.get("/v1/nodes", responses=responses(application_json=OBJECT))
        async def nodes() -> Response:
            return _json(named(self._overview.node_list(CALLER.get())))

        @app.get("/v1/requests", responses=responses(application_json=OBJECT))
        async def last_requests(limit: int = 20) -> Response:
            if not 1 <= limit <= MAX_LISTED:
                raise InvalidArgument(f"limit is {limit}", hint=f"use 1 to {MAX_LISTED}")
            caller = CALLER.get()
            tenant = None if caller.sees_all else caller.tenant
            return _json({"requests": self._request_log.recent(limit, tenant)})

        @app.get("/v1/requests/{request_id}", responses=responses(application_json=OBJECT))
        async def explain(request_id: str) -> Response:
            record = self._request_log.get(request_id)
            caller = CALLER.get()
            if record is None or not (caller.sees_all or record.tenant == caller.tenant):
                raise NotFound(
                    f"this conductor has no record of request {brief(request_id)!r}",
                    hint="it keeps the last ones only",
                )
            return _json(record)

        @app.get("/", response_class=HTMLResponse)
        async def index() -> str:
            return page

    async def _chat_tokens(
        self, messages: Sequence[ChatMessage], options: Mapping[str, Any] | None = None
    ) -> list[int]:
        if self._tokenizer is None:
            raise no_tokenizer()
        plain = [message.plain() for message in messages]
        return await asyncio.to_thread(self._tokenizer.encode_chat, plain, options)

    async def _prompt_tokens(self, raw: msgspec.Raw) -> list[int]:
        prompt = read_prompt(raw, self._config.advanced.max_prompt_tokens)
        if not isinstance(prompt, str):
            return prompt
        if self._tokenizer is None:
            raise no_tokenizer()
        return await asyncio.to_thread(self._tokenizer.encode, prompt)

    async def _prefetch(self, body: PrefetchRequest, http_request: Request) -> dict[str, Any]:
        given = body.given()
        key = body.key or (
            http_request.headers.get(KEY_HEADER, "")[:MAX_KEY_CHARS] if not given else ""
        )
        if len(given) > 1 or not (given or key):
            raise InvalidArgument("give exactly one of key, messages and prompt")
        namespace = self._worker_for(body.model).namespace
        if key:
            now = self._gateway.clock()
            hashes = self._gateway.sessions.get(namespace.namespace_id, key, now)
            if not hashes:
                raise NotFound(
                    f"session {brief(key)!r} is not known", hint="it has no request yet, or expired"
                )
        else:
            tokens = await (
                self._chat_tokens(body.messages)
                if body.messages
                else self._prompt_tokens(body.prompt)
            )
            check_prompt(tokens, self._config.advanced.max_prompt_tokens, 0, len(tokens))
            hashes = hash_chain(namespace, tokens)
        return (await self._gateway.prefetch.hint(namespace, hashes)).document()

    async def _serve(
        self,
        body: ChatRequest | CompletionRequest,
        prompt: list[int],
        max_tokens: int | None,
        http_request: Request,
    ) -> Response:
        fields = other_fields(await http_request.body(), body.__struct_fields__)
        request = self._request_of(body, fields, prompt, max_tokens, http_request)
        try:
            run = await unless_disconnected(http_request, self._gateway.admit(request))
            if run is None:
                return Response(status_code=CLIENT_LEFT)
            response = CompletionResponse(run, self._metrics, self._tokenizer, body)
            headers = response.headers()
            if body.stream:
                return EventStreamResponse(response.events(), headers, run.leave)
            document = await unless_disconnected(http_request, response.document())
        except KvpoolError as error:
            refusal = error_response(error)
            refusal.headers["X-Request-Id"] = request.request_id  # for `kvpool explain`
            return refusal
        if document is None:
            return Response(status_code=CLIENT_LEFT)
        return JSONResponse(document, headers=headers)

    def _request_of(
        self,
        body: ChatRequest | CompletionRequest,
        fields: dict[str, Any],
        prompt: list[int],
        max_tokens: int | None,
        http_request: Request,
    ) -> GenerationRequest:
        """The request that a body asks for.

        Args:
            fields: what the body asks for beyond `body`.

        Raises:
            InvalidArgument: it is over a limit, or a field cannot be honoured.
            NotFound, Unavailable: no worker serves the model.
        """
        tokenized_at = self._gateway.clock()
        received_at: float = http_request.state.received_at
        worker = self._worker_for(body.model or "")
        self._check_fields(fields, worker.model)
        wanted = self._output_tokens(prompt, max_tokens, worker.max_model_tokens)
        options, namespace, config = body.options, worker.namespace, self._config
        key = http_request.headers.get(KEY_HEADER, "")[:MAX_KEY_CHARS] or body.user or ""
        request_id = uuid.uuid4().hex
        rule_facts = Facts(
            model=worker.model,
            tenant=namespace.tenant,
            endpoint=http_request.url.path,
            key=key or request_id,
            prompt_tokens=len(prompt),
            output_tokens=wanted,
        )
        facts = requests.Request(
            request_id,
            len(prompt),
            namespace.layout.block_tokens,
            namespace.layout.block_bytes,
            wanted,
            received_at,
            received_at + config.request_timeout_s,
            tokenized_at,
            self._objectives(rule_facts, options),
            priority=priority_of(
                options.priority,
                namespace.tenant,
                config.tenant_priorities,
                config.advanced.default_priority,
            ),
            pool=options.pool,
            mode=MODES[options.prefill],
            pin_decode=options.decode_worker,
            tenant=namespace.tenant,
            model=worker.model,
            endpoint=rule_facts.endpoint,
            key=key,
        )
        sampling = m.Sampling(
            wanted,
            1.0 if body.temperature is None else body.temperature,
            1.0 if body.top_p is None else body.top_p,
            # Drawn here, so that another worker that goes on after a failure draws the same tokens.
            (secrets.randbits(31) if body.seed is None else body.seed) & MAX_SEED,
            bool(body.ignore_eos),
        )
        engine_fields = fields | body.sampling_fields()
        return GenerationRequest(
            facts, namespace, prompt, sampling, options.local_prefix_tokens, engine_fields
        )

    def _check_fields(self, fields: dict[str, Any], model: str) -> None:
        """Refuse fields that a worker of this model cannot honour. Raises `InvalidArgument`."""
        if fields:
            workers = (worker.descriptor for worker in self._overview.workers_of(CALLER.get()))
            serving = (worker for worker in workers if worker.model == model)
            check_fields(fields, is_engine_server=all(map(is_engine_server, serving)))

    def _output_tokens(self, prompt: Sequence[int], max_tokens: int | None, limit: int) -> int:
        """The tokens to generate, if prompt and response are within the limits.

        Args:
            limit: of the model's context.

        Raises:
            InvalidArgument: they are not.
        """
        wanted = max_tokens or min(DEFAULT_MAX_TOKENS, max(1, limit - len(prompt)))
        if wanted > self._config.advanced.max_output_tokens:
            raise InvalidArgument(
                f"max_tokens is {wanted}",
                hint=f"the limit is {self._config.advanced.max_output_tokens}",
            )
        check_prompt(prompt, self._config.advanced.max_prompt_tokens, wanted, limit)
        return wanted

    def _objectives(self, facts: Facts, options: PoolOptions) -> requests.Objectives:
        config = self._config
        of_tenant = config.tenant_objectives.get(facts.tenant, NO_OBJECTIVE)
        return requests.objectives(
            (options.slo_ttft_s, options.slo_tpot_s),
            self._gateway.rules.objectives(facts),
            (of_tenant.ttft_s, of_tenant.tpot_s),
            (config.slo_ttft_s, config.slo_tpot_s),
        )

    def _worker_for(self, model: str) -> m.WorkerDescriptor:
        members = self._overview.workers_of(CALLER.get())
        members.sort(key=lambda worker: worker.state is not State.LIVE)  # live workers first
        workers = [worker.descriptor for worker in members]
        if not workers:
            raise Unavailable("no worker has joined yet", hint=NO_WORKER)
        for worker in workers:
            if not model or worker.model == model:
                return worker
        served = ", ".join(sorted({worker.model for worker in workers}))
        raise NotFound(f"no worker serves model {brief(model)!r}", hint=f"served: {served}")


def no_tokenizer() -> Unavailable:
    """The error of a conductor without `conductor.model_path`."""
    return Unavailable(
        "this conductor has no tokenizer",
        hint="set conductor.model_path, or send token ids to /v1/completions",
    )


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


class ArrivalClock:
    """Middleware that sets `request.state.received_at` (monotonic seconds) before the body is read.

    TTFT and the deadline of a request count from there.
    """

    def __init__(self, app: ASGIApp, clock: Callable[[], float]) -> None:
        self._app = app
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope.setdefault("state", {})["received_at"] = self._clock()
        await self._app(scope, receive, send)
