"""Carries out the role controller's moves, and publishes its advice."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import structlog

from conductor.cluster.connections import Connections
from conductor.cluster.members import Workers
from conductor.members.membership import State
from conductor.roles.controller import Instance, RoleController, RoleDecision
from kvpool.errors import KvpoolError
from kvpool.wire import messages as m

log = structlog.get_logger(__name__)

STEP_S = 1.0
CALL_TIMEOUT_S = 2.0


class RoleActuator:
    """Runs the controller's steps and sends workers their new roles.

    Args:
        is_active: whether moves are carried out. Advice is published in any case.
    """

    def __init__(
        self,
        workers: Workers,
        connections: Connections,
        counters: Counter[str],
        controller: RoleController,
        *,
        is_active: bool,
        clock: Callable[[], float],
    ) -> None:
        self.decision = RoleDecision(None, (), 0.0, 0.0, 0)
        self._workers = workers
        self._counters = counters
        self._connections = connections
        self._controller = controller
        self._is_active = is_active
        self._clock = clock
        self._history: list[dict[str, Any]] = []

    async def run(self) -> None:
        """Step until cancelled."""
        while True:
            await asyncio.sleep(STEP_S)
            await self.step()

    async def step(self) -> None:
        """Run one step of the controller. At most one worker changes its role."""
        self.decision = self._controller.step(self._instances(), self._clock())
        move = self.decision.move
        if move is None:
            return
        worker = self._workers.get(move.worker_id)
        if worker is None:
            return
        try:
            await self._connections.call_worker(worker, m.SetRole(move.role), CALL_TIMEOUT_S)
        except KvpoolError as error:
            self._counters["roles:failed"] += 1
            log.warning("a worker did not change its role", worker=move.worker_id, error=str(error))
            return
        self._counters[f"roles:to_{move.role}"] += 1
        self._history = [*self._history[-99:], {"at_s": self._clock(), **asdict(move)}]
        log.info("role changed", worker=move.worker_id, role=move.role, reason=move.reason)

    def advice(self) -> dict[str, Any]:
        """The document of `/v1/scaling`: workers by role, advised changes, and the last moves."""
        instances = self._instances()
        counts = {
            role: sum(i.role == role for i in instances) for role in ("prefill", "decode", "both")
        }
        desired = dict(counts)
        for advice in self.decision.advice:
            desired[advice.role] = max(0, desired[advice.role] + advice.change)
        return {
            "instances": counts,
            "desired": desired,
            "advice": [asdict(advice) for advice in self.decision.advice],
            "ttft_violations": self.decision.ttft_violations,
            "tpot_violations": self.decision.tpot_violations,
            "requests": self.decision.requests,
            "moves": self._history,
        }

    def _instances(self) -> list[Instance]:
        found = []
        for worker in self._workers:
            load = worker.report
            if worker.state is not State.LIVE or load is None:
                continue
            found.append(
                Instance(
                    worker.member_id,
                    worker.descriptor.role,
                    load.running,
                    load.places,
                    load.queued_prefill_tokens,
                    self._is_active
                    and worker.descriptor.role != "both"
                    and worker.descriptor.may_change_role,
                )
            )
        return found
