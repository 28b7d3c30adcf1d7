"""The engine servers of `conductor.engines` as members: looked at regularly, welcomed, given up when silent.

Each conductor looks for itself, so they are not shared through Redis. To the scheduler they are workers like
any other; `conductor.engine_servers.openai_client` does the talking.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog

from conductor.cluster.cluster import Cluster
from conductor.cluster.connections import Connections
from conductor.engine_servers.openai_client import Encode, EngineClient
from kvpool.blocks.layout import Namespace
from kvpool.config.engine_server import EngineServer
from kvpool.errors import KvpoolError, Unavailable, brief
from kvpool.wire import messages as m

log = structlog.get_logger(__name__)

EPOCH = 1  # they hold nothing that a restart would void
UNKNOWN_CONTEXT = 1 << 20  # the server refuses itself what is too long


class EngineServers:
    """Keeps them members of the cluster for as long as they are well.

    Args:
        connections: learns how to reach them.
        encode: see `EngineClient`.
        every_s: between two looks at each.
    """

    def __init__(
        self,
        cluster: Cluster,
        connections: Connections,
        entries: Sequence[EngineServer],
        encode: Encode | None,
        every_s: float,
    ) -> None:
        self._cluster = cluster
        self._every_s = every_s
        self._trouble: dict[str, str] = {}  # what was last wrong with a server; "": nothing
        self._clients = [EngineClient(entry, encode) for entry in entries]
        for client in self._clients:
            connections.add(client.entry.base_url, client)

    async def run(self) -> None:
        """Look after them until cancelled."""
        async with asyncio.TaskGroup() as group:
            for client in self._clients:
                group.create_task(self._attend(client), name=client.entry.worker_id)

    async def _attend(self, client: EngineClient) -> None:
        while True:
            await self.look_at(client)
            await asyncio.sleep(self._every_s)

    async def look_at(self, client: EngineClient) -> None:
        """One look: joins it, counts as its heartbeat, or leaves it silent."""
        entry = client.entry
        worker_id = entry.worker_id
        patience_s = self._cluster.workers.config.suspect_after_s
        try:
            context = await client.check(patience_s)
            load = await client.load(patience_s)
            if self._cluster.worker_heartbeat(m.WorkerHeartbeat(worker_id, EPOCH, load)).resync:
                namespace = self._namespace(entry)
                self._cluster.worker_join(m.WorkerJoin(_descriptor(entry, context, namespace)))
                self._cluster.worker_heartbeat(m.WorkerHeartbeat(worker_id, EPOCH, load))
        except KvpoolError as error:
            self._cluster.counters["engine_servers:not_well"] += 1
            # Each reason once: what keeps it away at last is seldom what did so at first.
            if self._trouble.get(worker_id) != str(error):
                log.warning("engine server is not well", worker=worker_id, error=str(error))
            self._trouble[worker_id] = str(error)
            return
        if self._trouble.get(worker_id) != "":
            log.info("engine server is well", worker=worker_id, url=entry.base_url)
        self._trouble[worker_id] = ""

    def _namespace(self, entry: EngineServer) -> Namespace:
        """Whose blocks its connector makes: as it is written, or as the pool knows it.

        Raises:
            Unavailable: the pool knows none that it could be, or several.
        """
        if entry.is_described:
            return entry.namespace()
        known = self._cluster.namespaces.of(
            entry.named, entry.tenant, entry.salt.get_secret_value()
        )
        fitting = [namespace for namespace in known if entry.is_of(namespace)]
        if len(fitting) == 1:
            return fitting[0]
        names = ", ".join(namespace.revision for namespace in fitting)
        raise Unavailable(
            f"of the model {entry.named} the pool knows "
            + (f"several namespaces: {brief(names)}" if fitting else "no namespace yet"),
            hint="give the revision of the one meant: see `kvpool engines`"
            if fitting
            else "the engine's connector registers it when it starts",
        )


def is_engine_server(worker: m.WorkerDescriptor) -> bool:
    """Whether this worker is such a server: its own connector moves its KV."""
    return worker.address.startswith(("http://", "https://"))


def _descriptor(entry: EngineServer, context: int, namespace: Namespace) -> m.WorkerDescriptor:
    return m.WorkerDescriptor(
        entry.worker_id,
        EPOCH,
        entry.role,
        entry.host,
        entry.base_url,
        namespace,
        entry.model,
        entry.max_model_tokens or context or UNKNOWN_CONTEXT,
        entry.base_url,
        entry.kv_events,
        entry.kv_replay,
        may_change_role=False,
    )
