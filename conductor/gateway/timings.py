"""The phases of a request, as they follow one another. Pure.

Workers time what they do; here their figures are put together so that each second counts once: a prompt
computed elsewhere and its tail computed by the decode worker are both `prefill_compute_time`, and what the
decode worker's engine let it wait is `request_queue_wait` of a request that it prefilled itself, else
`decode_queue_wait`. What went on beside the computation (sending all layers but the last) is in none of them.
"""

from __future__ import annotations

from collections.abc import Mapping

PHASES = (
    "request_queue_wait",  # in the conductor's queue, and for the engine that computes the prompt
    "prefill_compute_time",
    "kv_cache_pack_time",  # putting the engine's KV into blocks
    "kv_cache_transfer_time",  # reading blocks, waiting for a disk included, and sending the last layer
    "kv_cache_unpack_time",  # putting blocks into the engine
    "decode_queue_wait",  # for the engine that decodes
    "first_token_emit_time",  # drawing the first token
    "per_token_decode_time",  # of each token after the first
)
RATES = frozenset(("per_token_decode_time",))  # do not add up over workers or attempts
EXPOSED = "kv_cache_transfer_exposed_time"  # the wait for the last layer, as workers report it


def of_prefill(reported: Mapping[str, float]) -> dict[str, float]:
    """What a prefill worker reports, as phases of the request. Whatever else it timed keeps its name."""
    phases = dict(reported)
    if EXPOSED in phases:
        phases["kv_cache_transfer_time"] = phases.get("kv_cache_transfer_time", 0.0)
        phases["kv_cache_transfer_time"] += phases[EXPOSED]
    return phases


def of_decode(reported: Mapping[str, float], *, is_prefilled_remotely: bool) -> dict[str, float]:
    """What a decode worker reports, as phases of the request."""
    phases = dict(reported)
    if is_prefilled_remotely:
        waited = phases.pop("request_queue_wait", 0.0)
        phases["decode_queue_wait"] = phases.get("decode_queue_wait", 0.0) + waited
    return phases


def add(total: dict[str, float], more: Mapping[str, float]) -> None:
    """Add phases that came later to `total`; of rates the later one holds."""
    for name, seconds in more.items():
        total[name] = seconds if name in RATES else total.get(name, 0.0) + seconds
