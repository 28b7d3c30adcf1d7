"""The phases of a request, in order. Pure.

Workers measure their own work. This module merges their figures so that each second counts once. A
prompt computed by a prefill worker and its tail computed by the decode worker are both
`prefill_compute_time`. The wait for the decode worker's engine is `request_queue_wait` if that
worker also prefills, otherwise `decode_queue_wait`. Work that overlaps with computation (sending
every layer but the last) is in no phase.
"""

from __future__ import annotations

from collections.abc import Mapping

PHASES = (
    "request_read_time",  # receiving the body and tokenizing the prompt
    "request_queue_wait",  # in the conductor's queue, and for the engine that computes the prompt
    "prefill_compute_time",
    "kv_cache_pack_time",  # copying the engine's KV into blocks
    # reading blocks (including waits for a disk) and sending the last layer
    "kv_cache_transfer_time",
    "kv_cache_unpack_time",  # copying blocks into the engine
    "decode_queue_wait",  # for the engine of the decode worker
    "first_token_emit_time",  # sampling the first token
    "per_token_decode_time",  # per token after the first
)
RATES = frozenset(("per_token_decode_time",))  # not summed over workers or attempts
EXPOSED = "kv_cache_transfer_exposed_time"  # the wait for the last layer, as workers report it


def of_prefill(reported: Mapping[str, float]) -> dict[str, float]:
    """A prefill worker's report as phases of the request. Other times keep their names."""
    phases = dict(reported)
    if EXPOSED in phases:
        phases["kv_cache_transfer_time"] = phases.get("kv_cache_transfer_time", 0.0)
        phases["kv_cache_transfer_time"] += phases[EXPOSED]
    return phases


def of_decode(reported: Mapping[str, float], *, is_prefilled_remotely: bool) -> dict[str, float]:
    """A decode worker's report as phases of the request."""
    phases = dict(reported)
    if is_prefilled_remotely:
        waited = phases.pop("request_queue_wait", 0.0)
        phases["decode_queue_wait"] = phases.get("decode_queue_wait", 0.0) + waited
    return phases


def add(total: dict[str, float], more: Mapping[str, float]) -> None:
    """Add later phases to `total`. A later rate replaces the earlier one."""
    for name, seconds in more.items():
        total[name] = seconds if name in RATES else total.get(name, 0.0) + seconds
