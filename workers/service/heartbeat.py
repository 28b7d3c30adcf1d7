"""Registers this worker with the conductor, and reports its load."""

from __future__ import annotations

import asyncio
import contextlib

import msgspec
import structlog

from kvpool.blocks.hash_check import proof_of
from kvpool.errors import REFUSALS, HashMismatch, InvalidArgument, KvpoolError
from kvpool.wire import WireClient, split_addresses
from kvpool.wire import messages as m
from kvpool.wire.credentials import NO_CREDENTIALS, Credentials
from workers.service.service import WorkerService

log = structlog.get_logger(__name__)

CALL_TIMEOUT_S = 2.0
RETRY_S = 0.5
ROLES = ("prefill", "decode", "both")


class Membership:
    """Joins, sends heartbeats, and joins again whenever the conductor does not know this worker.

    Args:
        conductors: wire addresses, separated by commas. The worker reports to the first that
            answers, and to the next one when that is lost.
        credentials: for all of them.
    """

    def __init__(
        self,
        conductors: str,
        descriptor: m.WorkerDescriptor,
        service: WorkerService,
        credentials: Credentials = NO_CREDENTIALS,
    ) -> None:
        self.is_joined = False
        self._descriptor = descriptor
        self._service = service
        self._links = [
            WireClient(
                address,
                descriptor.worker_id,
                kind="worker",
                epoch=descriptor.epoch,
                credentials=credentials,
            )
            for address in split_addresses(conductors)
        ]
        self._at = 0

    def set_role(self, request: m.SetRole) -> m.Ok:
        """Take another role. The conductor learns it with the next heartbeat; running requests continue.

        Raises:
            InvalidArgument: the role is unknown, or this worker's role is fixed.
        """
        if request.role not in ROLES:
            raise InvalidArgument(f"unknown role {request.role!r}", hint=", ".join(ROLES))
        if not self._descriptor.may_change_role:
            raise InvalidArgument(
                "this worker's role is fixed", hint="worker.advanced.may_change_role"
            )
        if request.role != self._descriptor.role:
            log.info("role changed", was=self._descriptor.role, role=request.role)
            self._descriptor = msgspec.structs.replace(self._descriptor, role=request.role)
            self.is_joined = False
        return m.Ok()

    async def run(self) -> None:
        """Join and send heartbeats until cancelled; then leave."""
        heartbeat_s = 1.0
        failures = 0
        try:
            while True:
                me = self._descriptor
                try:
                    if not self.is_joined:
                        reply: m.MemberReply = await self._link.call(
                            m.WorkerJoin(me, proof_of(me.namespace)), CALL_TIMEOUT_S
                        )
                        heartbeat_s = reply.heartbeat_s
                        self.is_joined = True
                        log.info("joined the conductor", conductor=self._link.address)
                    beat = m.WorkerHeartbeat(me.worker_id, me.epoch, self._service.load.report())
                    reply = await self._link.call(beat, CALL_TIMEOUT_S)
                    failures = 0
                    if reply.resync:
                        self.is_joined = False
                        continue
                    await asyncio.sleep(heartbeat_s / 2)
                except KvpoolError as error:
                    if isinstance(error, HashMismatch) and not failures:
                        log.error("the conductor refuses this worker", error=str(error))
                    elif self.is_joined or (isinstance(error, REFUSALS) and not failures):
                        log.warning("conductor lost", error=str(error))
                    self.is_joined = False
                    failures += 1
                    self._at = (self._at + 1) % len(self._links)
                    if failures % len(self._links) == 0:  # none of them answers
                        await asyncio.sleep(RETRY_S)
        finally:
            with contextlib.suppress(KvpoolError, asyncio.CancelledError):
                await self._link.call(m.WorkerLeave(me.worker_id, me.epoch), 0.5)
            for link in self._links:
                await link.close()

    @property
    def _link(self) -> WireClient:
        return self._links[self._at]
