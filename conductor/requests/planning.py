"""Plans a request: what the routing rules, the scheduler and one look-up make of it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from conductor.index.contract import Found, runs_of
from conductor.members.membership import State
from conductor.requests.request import Plan, Request
from conductor.routing.load_facts import pool_facts
from conductor.routing.rules import Facts, RoutingChoice
from conductor.scheduling.scheduler import ScheduleRequest, SchedulingInputs, schedule
from kvpool.blocks.records import Segment

Choose = Callable[[Facts], RoutingChoice]


@dataclass(slots=True, frozen=True)
class Where:
    """The KV of a request's model.

    Args:
        engine_blocks: worker id -> leading blocks in that engine's own prefix cache.
        stores_itself: whether a worker is an engine server, whose connector moves its KV.
    """

    namespace_id: bytes
    layers: int
    engine_blocks: Mapping[str, int]
    stores_itself: Callable[[str], bool] = lambda _worker_id: False


def plan(
    request: Request,
    where: Where,
    found: Found | None,
    inputs: SchedulingInputs,
    now: float,
    *,
    looked_up_at: float = 0.0,
    choice: RoutingChoice | None = None,
    is_rolled_back: bool = False,
    excluded: frozenset[str] = frozenset(),
    is_retry: bool = False,
) -> Plan:
    """Decide where the request runs now.

    Args:
        found: the look-up of its chain at `looked_up_at`; None if the pool is not used.
        choice: of the routing rules (`routing_choice`); None: there are none.
        is_rolled_back: the operator serves everything aggregated, whatever a request asks for.
        excluded: workers that must not decode.
        is_retry: after a failure; the decode worker prefills, and any worker may decode.

    Raises:
        ConfigError: the configured strategy does not exist.
    """
    segments = segments_by_host(found) if found is not None else {}
    decision = schedule(
        ScheduleRequest(
            request.request_id,
            where.namespace_id,
            request.prompt_tokens,
            request.block_tokens,
            request.block_bytes,
            where.layers,
            segments,
            engine_blocks=where.engine_blocks,
            output_tokens=request.max_tokens,
            ttft_s=request.objectives.ttft_s,
            tpot_s=request.objectives.tpot_s,
            mode="local" if is_retry else _mode(request, choice, is_rolled_back=is_rolled_back),
            pin_decode=None if is_retry else request.pin_decode,
            excluded=excluded,
        ),
        inputs,
        now,
    )
    prefiller = inputs.workers.get(decision.prefill or "")
    decoder = inputs.workers.get(decision.decode or "")
    return Plan(
        decision,
        found,
        sum(segment.count for segment in segments.get("", ())),
        looked_up_at,
        choice,
        prefiller.host if prefiller is not None else "",
        decoder.host if decoder is not None else "",
        stores_itself=prefiller is not None and where.stores_itself(prefiller.worker_id),
        has_other=_has_other(where.namespace_id, decision.decode, inputs),
    )


def _mode(request: Request, choice: RoutingChoice | None, *, is_rolled_back: bool) -> str:
    """The mode that the request or the routing rules set; "" lets the scheduler choose."""
    if request.pool != "on":
        return "local"
    chosen = choice.mode if choice is not None else ""
    return chosen if is_rolled_back or not request.mode else request.mode


def routing_choice(
    request: Request, found: Found | None, inputs: SchedulingInputs, choose: Choose
) -> RoutingChoice | None:
    """What the routing rules choose for a request when it arrives; None if they do not apply."""
    if request.pool != "on":
        return None
    facts = Facts(
        model=request.model,
        tenant=request.tenant,
        endpoint=request.endpoint,
        key=request.key or request.request_id,
        prompt_tokens=request.prompt_tokens,
        found_tokens=found_blocks(found) * request.block_tokens,
        output_tokens=request.max_tokens,
    )
    return choose(pool_facts(inputs, facts))


def segments_by_host(found: Found) -> dict[str, list[Segment]]:
    """The leading run as it is best read from each host that has a part of it; "": from others."""
    near = {
        found.hosts[holder.node_id]
        for holders, _ in runs_of(found.holders)
        for holder in holders
        if holder.node_id in found.hosts
    }
    return {host: found.segments(host) for host in ("", *sorted(near))}


def found_blocks(found: Found | None) -> int:
    """The number of leading blocks that the pool has."""
    return sum(segment.count for segment in found.segments("")) if found is not None else 0


def _has_other(namespace_id: bytes, decode: str | None, inputs: SchedulingInputs) -> bool:
    """Whether another live worker could decode."""
    return any(
        worker.worker_id != decode
        and worker.state is State.LIVE
        and worker.role in ("decode", "both")
        and worker.namespace_id == namespace_id
        for worker in inputs.workers.values()
    )
