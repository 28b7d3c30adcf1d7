"""A cluster as a user describes it (model, GPUs, counts, sizes), and the `Setup` made from it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from conductor.roles.controller import RoleLimits
from conductor.routing.rules import RoutingRules
from conductor.scheduling.cost_model import LinkProfile, Profile
from conductor.scheduling.inputs import SchedulerConfig
from kvpool.errors import ConfigError
from planner.simulator.setup import InstanceSpec, NodeSpec, Serving, Setup, TpotCheck
from planner.sizing.hardware import SAME_HOST, fitting, gpu_named
from planner.sizing.measured_profile import MeasuredProfile
from planner.sizing.model_shape import ModelShape

Admission = Literal["none", "late", "arrival", "predicted"]
ADMISSIONS: tuple[Admission, ...] = ("none", "late", "arrival", "predicted")
MAX_INSTANCES = 4096
_GROUP = re.compile(r"^(?P<count>\d{1,5})(?:@(?P<gpu>[A-Za-z0-9-]+))?(?::(?P<tp>\d{1,2}))?$")


@dataclass(slots=True, frozen=True)
class Group:
    """`count` equal instances. `gpu` or `tp` None: as in the scenario."""

    count: int
    gpu: str | None = None
    tp: int | None = None


def groups_of(text: str) -> list[Group]:
    """Instances from `8`, `8@h100`, `4@h100:8,4@a100:8` (GPU, and GPUs per instance).

    Raises:
        ConfigError: the text has another form.
    """
    found = []
    for part in text.split(","):
        match = _GROUP.match(part.strip())
        if match is None:
            raise ConfigError(
                f"{part!r} is not a group of instances", hint="write 8, 8@h100 or 4@h100:8,4@a100:8"
            )
        tp = int(match["tp"]) if match["tp"] else None
        found.append(Group(int(match["count"]), match["gpu"], tp))
    if sum(group.count for group in found) > MAX_INSTANCES:
        raise ConfigError(f"more than {MAX_INSTANCES} instances cannot be simulated")
    return found


@dataclass(slots=True, frozen=True)
class Scenario:
    """A cluster in a user's words. `kvpool simulate --help` describes the options behind the fields.

    Args:
        hosts: the number of hosts, over which the instances are spread in turn; 0: one per
            instance.
        link_bytes_per_s: of each host, in each direction.
        dram_bytes, nvme_bytes: of each host, for the pool.
        admission: as in the scheduler; "late": TTFT is checked at arrival and TPOT at the decode
            instance when the prefill is done, as in systems that decide in two places.
        measured: costs of every instance, instead of those computed from the GPU.
    """

    model: ModelShape
    prefill: Sequence[Group] = (Group(8),)
    decode: Sequence[Group] = (Group(8),)
    gpu: str = "h100"
    tp: int | None = None
    hosts: int = 0
    link_bytes_per_s: float = 100e9
    dram_bytes: int = 512 << 30
    nvme_bytes: int = 0
    block_tokens: int = 512
    weight_bytes: float = 2.0
    kv_value_bytes: float = 2.0
    serving: Serving = "pooled"
    strategy: str = "kv-centric"
    admission: Admission = "none"
    routing: RoutingRules | None = None
    slo_ttft_s: float = 0.0
    slo_tpot_s: float = 0.0
    is_overlapped: bool = True
    chunk_tokens: int = 2048
    max_sequences: int = 256
    engine_share: float = 0.5
    roles: RoleLimits | None = None
    max_waiting: int = 0
    seed: int = 0
    measured: MeasuredProfile | None = None
    same_host: LinkProfile = SAME_HOST  # between a node's memory and an engine of 8 GPUs

    @property
    def instances(self) -> int:
        return sum(group.count for group in (*self.prefill, *self.decode))


def setup_of(scenario: Scenario) -> Setup:
    """The cluster to simulate.

    Raises:
        ConfigError: the cluster cannot serve, the model does not fit, or a name is unknown.
    """
    other_host = LinkProfile(2e-4, scenario.link_bytes_per_s)
    instances = _instances(scenario, other_host)
    block_bytes = scenario.block_tokens * scenario.model.bytes_per_token(scenario.kv_value_bytes)
    if scenario.serving == "pooled" and max(scenario.dram_bytes, scenario.nvme_bytes) < block_bytes:
        raise ConfigError(
            f"each host gives the pool {scenario.dram_bytes:,} B of DRAM and {scenario.nvme_bytes:,} B of"
            f" NVMe, but one block takes {block_bytes:,} B",
            hint="give more DRAM, or simulate serving without a pool: disaggregated or coupled",
        )
    nodes = tuple(
        NodeSpec(
            f"node-{host}",
            host,
            max(1, scenario.dram_bytes // block_bytes),
            scenario.nvme_bytes // block_bytes,
        )
        for host in sorted({instance.host for instance in instances})
    )
    admission, tpot_check = _admission(scenario)
    return Setup(
        serving=scenario.serving,
        instances=tuple(instances),
        nodes=nodes,
        block_tokens=scenario.block_tokens,
        block_bytes=block_bytes,
        layers=scenario.model.layers,
        same_host=scenario.same_host,
        other_host=other_host,
        scheduling=SchedulerConfig(
            strategy=scenario.strategy, admission=admission, seed=scenario.seed, max_candidates=1
        ),
        routing=scenario.routing,
        slo_ttft_s=scenario.slo_ttft_s,
        slo_tpot_s=scenario.slo_tpot_s,
        is_overlapped=scenario.is_overlapped,
        chunk_tokens=scenario.chunk_tokens,
        max_sequences=scenario.max_sequences,
        engine_share=scenario.engine_share,
        tpot_check=tpot_check,
        roles=scenario.roles,
        max_waiting=scenario.max_waiting,
    )


def _instances(scenario: Scenario, other_host: LinkProfile) -> list[InstanceSpec]:
    instances: list[InstanceSpec] = []
    roles: tuple[tuple[Literal["prefill", "decode"], Sequence[Group]], ...] = (
        ("prefill", scenario.prefill),
        ("decode", scenario.decode),
    )
    for role, groups in roles:
        number = 0
        for group in groups:
            cost, capacity, dollars, kind = _engine(scenario, group, other_host)
            for _ in range(group.count):
                # Numbered per role: with half as many hosts as instances, each host has one of each
                # role.
                at = number if scenario.hosts else len(instances)
                instances.append(
                    InstanceSpec(
                        f"{role}-{number:03}",
                        "both" if scenario.serving == "coupled" else role,
                        f"host-{at % (scenario.hosts or MAX_INSTANCES):03}",
                        cost,
                        capacity,
                        dollars,
                        kind,
                    )
                )
                number += 1
    return instances


def _admission(
    scenario: Scenario,
) -> tuple[Literal["none", "arrival", "predicted"], TpotCheck]:
    """How the scheduler admits requests, and who checks their TPOT."""
    if scenario.admission == "late":
        return "arrival", "decode"
    is_checked = scenario.admission != "none" and bool(scenario.slo_tpot_s)
    return scenario.admission, "both" if is_checked else "scheduler"


def _engine(
    scenario: Scenario, group: Group, other_host: LinkProfile
) -> tuple[Profile, int, float, str]:
    """Costs, KV capacity in tokens, price per hour and name of one instance."""
    measured = scenario.measured
    if measured is not None and measured.kv_capacity_tokens:
        return measured.cost, measured.kv_capacity_tokens, 0.0, measured.source
    machine = fitting(
        scenario.model,
        gpu_named(group.gpu or scenario.gpu),
        group.tp or scenario.tp,
        weight_bytes=scenario.weight_bytes,
        kv_value_bytes=scenario.kv_value_bytes,
    )
    if measured is not None:  # without a capacity: take that of such a GPU
        return measured.cost, machine.kv_capacity_tokens, 0.0, measured.source
    cost = machine.profile(scenario.same_host, other_host)
    kind = f"{machine.gpu.name} x{machine.tp}"
    return cost, machine.kv_capacity_tokens, machine.dollars_per_hour, kind
