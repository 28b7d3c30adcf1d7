"""Checks the engine servers of `conductor.engines` regularly, and makes the healthy ones members.

Each conductor checks them itself, so they are not shared through Redis. To the scheduler they are
workers. `conductor.engine_servers.openai_client` sends their requests.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

import structlog

from conductor.cluster.connections import Connections
from conductor.cluster.members import Members
from conductor.cluster.reports import WorkerReports
from conductor.engine_servers.openai_client import Encode, EngineClient
from kvpool.blocks.layout import Namespace
from kvpool.config.engine_server import EngineServer
from kvpool.errors import KvpoolError, Unavailable, brief
from kvpool.wire import messages as m

log = structlog.get_logger(__name__)

EPOCH = 1  # a restart of a server invalidates nothing that the conductor knows of it
UNKNOWN_CONTEXT = 1 << 20  # the server itself refuses prompts that are too long


class EngineServers:
    """Keeps healthy engine servers in the cluster.

    Args:
        connections: gets a client for each server.
        encode: as of `EngineClient`.
        every_s: interval between two checks of a server.
    """

    def __init__(
        self,
        members: Members,
        reports: WorkerReports,
        connections: Connections,
        counters: Counter[str],
        entries: Sequence[EngineServer],
        encode: Encode | None,
        every_s: float,
    ) -> None:
        self._members = members
        self._reports = reports
        self._counters = counters
        self._every_s = every_s
        self._trouble: dict[str, str] = {}  # the last error of each server; "": none
        self._clients = [EngineClient(entry, encode) for entry in entries]
        for client in self._clients:
            connections.add(client.entry.base_url, client)

    async def run(self) -> None:
        """Check the servers until cancelled."""
        async with asyncio.TaskGroup() as group:
            for client in self._clients:
                group.create_task(self._check_regularly(client), name=client.entry.worker_id)

    async def _check_regularly(self, client: EngineClient) -> None:
        while True:
            await self.check(client)
            await asyncio.sleep(self._every_s)

    async def check(self, client: EngineClient) -> None:
        """Check a server once.

        Success is its join or its heartbeat; after a failure it stays silent.
        """
        entry = client.entry
        worker_id = entry.worker_id
        patience_s = self._members.workers.config.suspect_after_s
        try:
            context = await client.check(patience_s)
            load = await client.load(patience_s)
            heartbeat = m.WorkerHeartbeat(worker_id, EPOCH, load)
            if self._reports.heartbeat(heartbeat).resync:
                namespace = self._namespace(entry)
                await self._reports.join(m.WorkerJoin(_descriptor(entry, context, namespace)))
                self._reports.heartbeat(heartbeat)
        except KvpoolError as error:
            self._counters["engine_servers:failed_checks"] += 1
            # Log each reason once: the last one often differs from the first.
            if self._trouble.get(worker_id) != str(error):
                log.warning("engine server failed its check", worker=worker_id, error=str(error))
            self._trouble[worker_id] = str(error)
            return
        if self._trouble.get(worker_id) != "":
            log.info("engine server is healthy", worker=worker_id, url=entry.base_url)
        self._trouble[worker_id] = ""

    def _namespace(self, entry: EngineServer) -> Namespace:
        """The namespace of the server's blocks: configured, or the only match that the pool knows.

        Raises:
            Unavailable: the pool knows no matching namespace, or several.
        """
        if entry.is_described:
            return entry.namespace()
        known = self._members.namespaces.of(
            entry.named, entry.tenant, entry.salt.get_secret_value()
        )
        fitting = [namespace for namespace in known if entry.is_of(namespace)]
        if len(fitting) == 1:
            return fitting[0]
        names = ", ".join(namespace.revision for namespace in fitting)
        raise Unavailable(
            f"the pool knows several namespaces of model {entry.named}: {brief(names)}"
            if fitting
            else f"the pool knows no namespace of model {entry.named} yet",
            hint="set the server's revision; `kvpool engines` lists them"
            if fitting
            else "the engine's connector registers it when it starts",
        )


def is_engine_server(worker: m.WorkerDescriptor) -> bool:
    """Whether this worker is an engine server, whose own connector moves its KV."""
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
