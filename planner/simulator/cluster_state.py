"""The scheduler's inputs from the simulated cluster: workers as they last reported, nodes, the cost model.

It replaces `conductor.cluster.scheduler_view.SchedulerView.inputs`.
"""

from __future__ import annotations

from dataclasses import replace

from conductor.scheduling.cost_model import MEASURED, CostModel
from conductor.scheduling.in_flight import InFlight
from conductor.scheduling.scheduler import IDLE, NodeStatus, SchedulingInputs, WorkerStatus
from kvpool.blocks.records import WorkerLoad
from kvpool.blocks.tier import Tier
from planner.simulator.instance import Instance
from planner.simulator.network import Network
from planner.simulator.setup import InstanceSpec, Setup

PROBES = ((256, 0), (1024, 0), (4096, 0), (16384, 0), (2048, 8192), (8192, 32768))


class ClusterState:
    """The status of workers and nodes, and the fitted cost model.

    The fits start from a few measurements of every worker, as if `kvpool worker profile` had been
    run on it.
    """

    def __init__(self, setup: Setup, namespace_id: bytes) -> None:
        self.setup = setup
        self.cost = CostModel(setup.instances[0].cost)
        self.in_flight = InFlight()
        self.workers: dict[str, WorkerStatus] = {}
        self.nodes: dict[str, NodeStatus] = {}
        self.reserved_bytes: dict[str, int] = {node.node_id: 0 for node in setup.nodes}
        self._namespace_id = namespace_id
        self._inputs: SchedulingInputs | None = None
        for spec in setup.instances:
            self.set_role(spec, spec.role)
            self._profile(spec)
        for node in setup.nodes:
            available = node.dram_blocks * setup.block_bytes
            self.nodes[node.node_id] = NodeStatus(
                node.node_id,
                node.host,
                available,
                read_bytes_per_s={Tier.NVME: node.nvme_bytes_per_s},
            )
        if setup.serving == "disaggregated":
            # Nodes keep nothing, so transfers from prefill to decode always find memory.
            self.nodes = {n: replace(v, available_bytes=1 << 62) for n, v in self.nodes.items()}

    def scheduling_inputs(self) -> SchedulingInputs:
        """The cluster as the scheduler may see it now."""
        if self._inputs is None:
            config = self.setup.scheduling
            self._inputs = SchedulingInputs(
                self.workers, self.nodes, self.cost, self.in_flight, config
            )
        return self._inputs

    def set_role(self, spec: InstanceSpec, role: str) -> None:
        known = self.workers.get(spec.worker_id)
        self.workers[spec.worker_id] = WorkerStatus(
            spec.worker_id,
            role,
            spec.host,
            self._namespace_id,
            load=known.load if known else IDLE,
            reported_at=known.reported_at if known else 0.0,
            kv_capacity_tokens=self.sequence_kv_tokens(spec),
        )

    def sequence_kv_tokens(self, spec: InstanceSpec) -> int:
        """The tokens of KV memory that an engine has for running sequences."""
        return int(spec.kv_capacity_tokens * (1 - self.setup.engine_share))

    def take_heartbeat(self, instance: Instance, now: float) -> None:
        """Take an instance's load, and its decode step for the fit."""
        step_s = instance.step_s()
        if step_s:
            self.cost.observe_tpot(instance.worker_id, instance.context, instance.sequences, step_s)
        load = WorkerLoad(
            running=instance.running,
            queued_prefill_tokens=instance.queued_tokens,
            decode_sequences=instance.sequences,
            decode_context_tokens=instance.context,
            prefill_tokens_per_s=0.0,
            tpot_s=step_s,
            places=self.setup.max_sequences,
        )
        known = self.workers[instance.worker_id]
        self.workers[instance.worker_id] = replace(known, load=load, reported_at=now)

    def reserve_bytes(self, node_id: str | None, size_bytes: int) -> None:
        """Reserve bytes on a node, or give them back if `size_bytes` is negative."""
        if node_id is None or self.setup.serving != "pooled":
            return
        self.reserved_bytes[node_id] += size_bytes
        node = self.nodes[node_id]
        self.nodes[node_id] = replace(node, available_bytes=node.available_bytes - size_bytes)

    def report_disk_queues(self, network: Network, now: float) -> None:
        """Take the bytes that wait to be read from each node's disk."""
        for spec in self.setup.nodes:
            if spec.nvme_blocks:
                queued = network.disk_queue_bytes(now, spec.node_id, spec.nvme_bytes_per_s)
                node = self.nodes[spec.node_id]
                self.nodes[spec.node_id] = replace(node, queued_read_bytes=queued)

    def _profile(self, spec: InstanceSpec) -> None:
        for _ in range(max(1, MEASURED - 2)):
            for new, reused in PROBES:
                seconds = spec.cost.prefill_s(new, reused)
                self.cost.observe_prefill(spec.worker_id, new, reused, seconds)
            for batch in (1, 8, 32, 128):
                for context in (512, 4096):
                    total = batch * context
                    seconds = spec.cost.tpot_s(total, batch)
                    self.cost.observe_tpot(spec.worker_id, total, batch, seconds)
