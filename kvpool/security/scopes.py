"""The scope that each call needs: one table for the wire, one for HTTP, one for gRPC.

Other calls need admin.
"""

from __future__ import annotations

from kvpool.wire import messages as m
from kvpool.wire.principal import Scope

READ, WRITE, ADMIN, INTERNAL = Scope.READ, Scope.WRITE, Scope.ADMIN, Scope.INTERNAL

MESSAGES: dict[type[m.Message], Scope] = {
    # Any server.
    m.Ping: READ,
    # Nodes.
    m.Describe: READ,
    m.RegisterNamespace: READ,
    m.Pin: READ,
    m.Renew: READ,
    m.Release: READ,
    m.ReportCorrupt: READ,  # the node checks the claim itself
    m.NodeLookup: READ,
    m.GetInline: READ,
    m.Prefetch: READ,
    m.NodeStats: READ,
    m.ListNamespaces: READ,
    m.ListBlocks: READ,
    m.Reserve: WRITE,
    m.RenewReservation: WRITE,
    m.Commit: WRITE,
    m.Abort: WRITE,
    m.PutInline: WRITE,
    m.Protect: WRITE,
    m.DropBlocks: WRITE,
    m.Replicate: WRITE,
    m.Drain: ADMIN,
    m.ResizeDram: ADMIN,
    # Conductors.
    m.Lookup: READ,
    m.ReportMiss: READ,
    m.CountCopies: READ,
    m.Nodes: READ,
    m.Namespaces: READ,
    m.Tokenize: READ,
    m.PoolStats: READ,
    m.RulesChange: ADMIN,
    m.RulesExplain: ADMIN,
    m.NodeJoin: INTERNAL,
    m.NodeEvents: INTERNAL,
    m.NodeHeartbeat: INTERNAL,
    m.NodeLeave: INTERNAL,
    m.NodeDraining: INTERNAL,
    m.WorkerJoin: INTERNAL,
    m.WorkerHeartbeat: INTERNAL,
    m.WorkerLeave: INTERNAL,
    # Workers.
    m.SetRole: INTERNAL,
    m.Prefill: INTERNAL,
    m.Generate: INTERNAL,
}

# Internal messages that a tenant's own worker may send.
OF_TENANTS_WORKERS: frozenset[type[m.Message]] = frozenset(
    (m.WorkerJoin, m.WorkerHeartbeat, m.WorkerLeave)
)

# By method and path of the route. None: no token needed, since the answer reveals nothing.
ROUTES: dict[tuple[str, str], Scope | None] = {
    ("GET", "/healthz"): None,
    ("GET", "/readyz"): None,
    ("GET", "/docs"): None,
    ("GET", "/docs/oauth2-redirect"): None,
    ("GET", "/openapi.json"): None,
    ("GET", "/metrics"): Scope.METRICS,
    ("GET", "/v1/stats"): READ,
    # Nodes.
    ("PUT", "/v1/dram"): ADMIN,
    ("POST", "/v1/namespaces"): READ,
    ("PUT", "/v1/blocks/{namespace_id}/{block_hash}"): WRITE,
    ("GET", "/v1/blocks/{namespace_id}/{block_hash}"): READ,
    # Conductors.
    ("GET", "/"): None,  # the page; it fetches its data with a token
    ("POST", "/v1/chat/completions"): WRITE,
    ("POST", "/v1/completions"): WRITE,
    ("POST", "/v1/prefetch"): WRITE,
    ("GET", "/v1/models"): READ,
    ("GET", "/v1/scaling"): Scope.METRICS,  # for autoscalers
    ("GET", "/v1/nodes"): READ,
    ("GET", "/v1/requests"): READ,
    ("GET", "/v1/requests/{request_id}"): READ,
}

METHODS: dict[str, Scope] = {
    "/kvpool.v1.Conductor/RegisterNamespace": READ,
    "/kvpool.v1.Conductor/Lookup": READ,
    "/kvpool.v1.Conductor/Nodes": READ,
    "/kvpool.v1.Conductor/Stats": READ,
    "/kvpool.v1.Node/RegisterNamespace": READ,
    "/kvpool.v1.Node/Lookup": READ,
    "/kvpool.v1.Node/Get": READ,
    "/kvpool.v1.Node/Stats": READ,
    "/kvpool.v1.Node/Put": WRITE,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": READ,
}
