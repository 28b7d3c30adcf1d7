"""Clusters and requests for tests of the scheduler: built by hand, or drawn by hypothesis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from conductor.members.membership import State
from conductor.scheduling.cost_model import CostModel, LinkProfile, Profile
from conductor.scheduling.decision import Candidate, Decision
from conductor.scheduling.in_flight import InFlight
from conductor.scheduling.scheduler import (
    IDLE,
    NodeStatus,
    SchedulerConfig,
    ScheduleRequest,
    SchedulingInputs,
    WorkerStatus,
)
from kvpool.blocks.records import Segment
from kvpool.blocks.tier import Tier
from kvpool.wire.messages import WorkerLoad

NS = b"n" * 16
BLOCK = 64
BLOCK_BYTES = 1_474_560  # SmolLM2-135M, 64 tokens
GIB = 1 << 30

# Prefill 1 ms a token; decode 10 ms + 1 ms a sequence; links fast enough to make reuse pay.
PROFILE = Profile(
    prefill_base_s=1e-6,
    prefill_token_s=1e-3,
    prefill_attention_s=1e-12,
    tpot_base_s=1e-2,
    tpot_context_s=1e-12,
    tpot_sequence_s=1e-3,
    same_host=LinkProfile(1e-3, 10e9),
    other_host=LinkProfile(1e-3, 1e9),
)


def request(blocks: int = 16, tail: int = 10, **changes: Any) -> ScheduleRequest:
    base = ScheduleRequest("r", NS, blocks * BLOCK + tail, BLOCK, BLOCK_BYTES, 30)
    return replace(base, **changes)


def worker(worker_id: str, role: str = "both", host: str = "h1", **changes: Any) -> WorkerStatus:
    return replace(WorkerStatus(worker_id, role, host, NS), **changes)


def busy(**figures: float) -> WorkerLoad:
    fields = {name: getattr(IDLE, name) for name in IDLE.__struct_fields__}
    return WorkerLoad(**{**fields, **figures})


def inputs_of(
    workers: Sequence[WorkerStatus],
    nodes: Sequence[NodeStatus] = (NodeStatus("n1", "h1", GIB), NodeStatus("n2", "h2", GIB)),
    in_flight: InFlight | None = None,
    **config: Any,
) -> SchedulingInputs:
    return SchedulingInputs(
        {w.worker_id: w for w in workers},
        {n.node_id: n for n in nodes},
        CostModel(PROFILE),
        InFlight() if in_flight is None else in_flight,
        replace(SchedulerConfig(), **config),
    )


def measured(inputs: SchedulingInputs) -> SchedulingInputs:
    """The same view, in which every worker was measured to be just as the profile says."""
    for worker_id in inputs.workers:
        for _ in range(3):
            new = 1000
            inputs.cost.observe_prefill(worker_id, new, 0, inputs.cost.prefill_s(worker_id, new))
            tpot_s = inputs.cost.tpot_s(worker_id, 1000, 1)
            inputs.cost.observe_tpot(worker_id, 1000, 1, tpot_s)
    return inputs


def pool_has(
    blocks: int, node: str = "n1", tier: Tier = Tier.DRAM
) -> Mapping[str, Sequence[Segment]]:
    return {"": [Segment(node, 0, blocks, tier)]}


loads = st.builds(
    busy,
    queued_prefill_tokens=st.integers(0, 20_000),
    decode_sequences=st.integers(0, 64),
    decode_context_tokens=st.integers(0, 100_000),
    prefill_tokens_per_s=st.sampled_from([0.0, 1000.0]),
)
workers_lists = st.lists(
    st.builds(
        WorkerStatus,
        st.sampled_from([f"w{i}" for i in range(6)]),
        st.sampled_from(["prefill", "decode", "both"]),
        st.sampled_from(["h1", "h2"]),
        st.just(NS),
        st.sampled_from([State.LIVE, State.LIVE, State.SUSPECT, State.DRAINING]),
        loads,
        st.sampled_from([0.0, 5.0]),
        st.sampled_from([0, 500, 100_000]),
        st.sampled_from([0, 20_000]),
    ),
    max_size=6,
    unique_by=lambda w: w.worker_id,
)
nodes_lists = st.lists(
    st.builds(
        NodeStatus,
        st.sampled_from(["n1", "n2", "n3"]),
        st.sampled_from(["h1", "h2", "h3"]),
        st.sampled_from([0, 10 * BLOCK_BYTES, GIB]),
        st.sampled_from(list(State)),
    ),
    max_size=3,
    unique_by=lambda n: n.node_id,
)
requests = st.builds(
    request,
    st.integers(0, 40),
    st.integers(1, BLOCK - 1),
    segments=st.builds(
        pool_has,
        st.integers(1, 40),
        st.sampled_from(["n1", "n2"]),
        st.sampled_from([Tier.DRAM, Tier.NVME]),
    ),
    engine_blocks=st.dictionaries(st.sampled_from(["w0", "w1"]), st.integers(0, 50)),
    ttft_s=st.sampled_from([0.0, 0.5, 5.0]),
    tpot_s=st.sampled_from([0.0, 0.02, 1.0]),
    mode=st.sampled_from(["", "", "local", "disaggregated"]),
    pin_decode=st.sampled_from([None, None, "w0"]),
    excluded=st.sampled_from([frozenset(), frozenset(["w1"])]),
)


def check_valid(one: ScheduleRequest, inputs: SchedulingInputs, decision: Decision) -> None:
    """The decision is one that a request may be given in this state."""
    assert decision.reason
    if decision.is_refused:
        assert (decision.prefill, decision.decode) == (None, None)
        assert decision.retry_after_s > 0 or decision.reason == "prompt_too_long"
        assert all(c.rejected for c in decision.candidates)
        return
    best: Candidate = decision.candidates[0]
    assert not best.rejected
    assert decision.decode is not None
    assert (decision.prefill is None) == (decision.mode == "local")
    for worker_id, roles in ((decision.decode, "decode both"), (decision.prefill, "prefill both")):
        if worker_id is not None:
            chosen = inputs.workers[worker_id]
            assert chosen.state is State.LIVE
            assert chosen.role in roles
            assert worker_id not in one.excluded
    assert one.pin_decode in (None, decision.decode)
    assert one.mode in ("", decision.mode) or decision.reason == "nothing_remote"
    assert 0 <= decision.reuse_blocks * BLOCK < one.prompt_tokens
    if decision.mode == "disaggregated":
        assert decision.prefill != decision.decode
        assert decision.target_node is not None
        target = inputs.nodes[decision.target_node]
        assert target.state is State.LIVE
        new_blocks = one.full_blocks - decision.reuse_blocks
        assert target.available_bytes >= new_blocks * BLOCK_BYTES > 0
