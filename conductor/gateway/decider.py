"""Asks the scheduler about one request: what the pool has of it, what the routing rules say, who could serve it.

It gathers what a decision may depend on and decides nothing itself (`conductor.scheduling.scheduler`); it changes nothing
but what the job remembers of being decided.
"""

from __future__ import annotations

from conductor.cluster.cluster import Cluster
from conductor.gateway.request import Job
from conductor.routing.rules import Facts
from conductor.routing.rules_file import RulesFile
from conductor.routing.service import pool_facts
from conductor.scheduling.decision import Decision
from conductor.scheduling.scheduler import ScheduleRequest, SchedulingInputs, schedule
from kvpool.blocks.hashing import hash_chain

MODES = {"auto": "", "remote": "disaggregated", "local": "local"}


class Decider:
    """Decides jobs over a cluster, as it is when asked.

    Args:
        ttft_s, tpot_s: objectives of requests; 0 means none.
    """

    def __init__(self, cluster: Cluster, rules: RulesFile, ttft_s: float, tpot_s: float) -> None:
        self._cluster = cluster
        self._rules = rules
        self._ttft_s = ttft_s
        self._tpot_s = tpot_s

    async def decide(
        self, job: Job, excluded: frozenset[str] = frozenset(), mode: str = ""
    ) -> Decision:
        """Where the job should run now.

        Args:
            excluded: workers that may not decode.
            mode: "local" or "disaggregated" overrides the request and the routing rules; "" leaves it to them.
        """
        if not job.hashes:
            job.hashes = hash_chain(job.namespace, job.prompt)
        layout = job.namespace.layout
        namespace_id = job.namespace.namespace_id
        found = await self._cluster.find(namespace_id, job.hashes) if job.pool == "on" else None
        # Nothing is awaited from here on: the decision is about the cluster as it is now.
        inputs = self._cluster.scheduling_inputs(job.namespace.tenant)
        hosts = {worker.host for worker in inputs.workers.values()}
        segments = {host: found.segments(host) for host in hosts} if found else {}
        job.found_blocks = max((sum(s.count for s in run) for run in segments.values()), default=0)
        wanted = mode or self._routed(job, inputs)
        request = ScheduleRequest(
            job.request_id,
            namespace_id,
            len(job.prompt),
            layout.block_tokens,
            layout.block_bytes,
            layout.layers,
            segments,
            engine_blocks=self._cluster.engine_feeds.leading(namespace_id, job.hashes),
            output_tokens=job.sampling.max_tokens,
            ttft_s=self._ttft_s,
            tpot_s=self._tpot_s,
            mode=wanted,
            pin_decode=job.pin_decode,
            excluded=excluded,
        )
        return schedule(request, inputs, self._cluster.clock())

    def _routed(self, job: Job, inputs: SchedulingInputs) -> str:
        """The mode that the request asks for, or the routing rules say; "" leaves it to the scheduler."""
        if job.pool != "on":
            return "local"
        facts = Facts(
            model=job.model,
            tenant=job.namespace.tenant,
            endpoint=job.endpoint,
            key=job.key or job.request_id,
            prompt_tokens=len(job.prompt),
            found_tokens=job.found_blocks * job.namespace.layout.block_tokens,
            output_tokens=job.sampling.max_tokens,
        )
        verdict = self._rules.choose(pool_facts(inputs, facts))
        job.transfer_timeout_s = verdict.transfer_timeout_s
        job.routing = f"{verdict.rule}:{verdict.reason}"
        asked = MODES[job.prefill]
        # A rollback is the operator's word; everything else the request may overrule.
        return verdict.mode if self._rules.is_rolled_back or not asked else asked
