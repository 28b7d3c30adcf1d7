"""Every counter in `/v1/stats` and `kvpool_..._events_total`: its name and what it counts.

A capital word in a name stands for a value, e.g. TIER in "evicted:TIER". docs/monitoring.md has
these tables; `python -m kvpool.serving.counters` prints them.
"""

from __future__ import annotations

NODE = {
    "hits": "blocks that a pin or read found",
    "misses": "blocks that a pin or read did not find",
    "miss:REASON": "pins and reads that stopped at a missing block, by reason",
    "committed": "parts of blocks committed",
    "no_room": "reservations that got fewer slots than they asked for",
    "evicted": "copies evicted to make room",
    "evicted:TIER": "the same, by tier",
    "evicted:soft": "evicted copies that were protected for a limited time",
    "lost": "blocks whose last copy was evicted or became unreadable",
    "lost_with_device": "copies lost with a failed device",
    "dropped": "blocks dropped on request, or because their bytes were wrong",
    "promoted": "copies made in a faster tier",
    "promoted:TIER": "the same, by the tier of the new copy",
    "demoted": "copies made in a slower tier",
    "demoted:TIER": "the same, by the tier of the new copy",
    "demotion_refused": "copies to a slower tier that found no room there",
    "migrations_cancelled": "copies between tiers that were cancelled",
    "migrations_failed": "copies between tiers that failed",
    "relocated": "blocks moved within a tier, out of memory that the node gives back",
    "slabs_reclaimed": "evictions that freed a slab for another slot size",
    "quarantined": "slots quarantined because a late write may still arrive",
    "leases_expired": "leases that expired before their release",
    "reservations_expired": "reservations that expired before their commit",
    "retained": "blocks protected by `kvpool protect`",
    "retention_refused": "protections refused because protected blocks have their share of a tier",
    "retention_ended": "protections ended on request",
    "retentions_expired": "protections that expired",
    "retentions_not_restored": "protections that a restart could not restore",
    "recovered": "blocks found on disk at the start",
    "namespaces_forgotten": "idle namespaces removed to make room for others",
    "namespaces_not_recorded": "namespaces that could not be recorded on disk",
    "namespaces_not_recovered": "recorded namespaces that could not be read at the start",
    "events_lost": "events for the conductor that did not fit the queue; a full report follows",
    "bytes_promoted": "bytes copied to a faster tier",
    "bytes_demoted": "bytes copied to a slower tier",
    "corrupt_blocks": "blocks dropped because a checksum did not match",
    "corrupt_replicas": "blocks from another node whose checksum did not match",
    "hbm_errors": "copies that the device refused",
    "disk_errors": "reads and writes of NVMe that failed",
    "disk_refusals": "single blocks that the NVMe files refused",
    "disk_probes": "reads that measure the speed of a disk again",
    "devices_lost": "NVMe devices given up after a failed read",
    "devices_read_only": "NVMe devices used for reading only after a failed write",
    "checkpoints_not_written": "records of the order of use that could not be written",
    "prefetch_accepted": "blocks accepted for prefetch",
    "prefetched": "accepted blocks that reached their tier",
    "prefetch_declined": "blocks not prefetched",
    "prefetch_declined:REASON": "the same, by reason",
    "replicated": "blocks copied from other nodes",
    "not_replicated:REASON": "blocks not copied from other nodes, by reason",
}

CONDUCTOR = {
    "requests:STATUS": "requests that ran: ok, failed, cancelled",
    "rejected:REASON": "requests refused, by reason",
    "failed:CODE": "requests that failed, by the code of the error",
    "fallback:REASON": "fallbacks to a plainer way of serving, by reason",
    "queued": "requests that waited for admission",
    "goodput_requests": "requests that met both objectives",
    "prompt_tokens": "tokens in prompts",
    "pool_tokens": "tokens of prompts whose KV came from the pool",
    "output_tokens": "tokens generated",
    "miss:REASON": "blocks of prompts that were not reused, by reason",
    "lookups": "look-ups in the index",
    "lookup_hits": "look-ups that found a block",
    "lookup_misses": "look-ups that found none",
    "reported_misses": "blocks that a client did not find where the index said",
    "event_gaps": "gaps in nodes' events; each leads to a full report",
    "layout_mismatches": "namespaces refused because a node reports another layout",
    "replications:asked": "copies of hot prefixes requested from nodes",
    "replications:declined": "copies of hot prefixes not requested: too many at once",
    "replications:failed": "copies of hot prefixes that failed",
    "replicated_blocks": "blocks that these copies stored",
    "prefetch:hints": "announced requests (`POST /v1/prefetch`)",
    "prefetch:resident": "blocks to prefetch that were in place already",
    "prefetch:promoting": "blocks requested from a node's disk",
    "prefetch:copying": "blocks requested from another node",
    "prefetch:copied": "blocks copied from another node by prefetch",
    "prefetch:declined:REASON": "blocks not prefetched, by reason",
    "routing:local:REASON": "requests that routing rules kept on one worker, by reason",
    "routing:rule:RULE": "requests that a routing rule matched, by its name",
    "routing:replaced": "changes of the routing rules",
    "routing:refused": "changed rules files that were invalid",
    "routing:rollbacks": "rollbacks to aggregated serving",
    "roles:to_ROLE": "workers switched to a role",
    "roles:failed": "workers that did not switch",
    "engine_servers:failed_checks": "checks of an engine server that failed",
    "engine_servers:not_stored": "prefills of an engine server that stored nothing in the pool",
    "kv_events:engines": "engines whose KV events are subscribed to now",
    "kv_events:blocks": "blocks that engines have in their own memory now",
    "kv_events:overflowed": "blocks of engines that did not fit the table",
    "kv_events:applied": "KV events applied",
    "kv_events:ignored": "KV events of kinds that do not matter here",
    "kv_events:bad": "KV events that could not be read",
    "kv_events:gaps": "gaps in KV events",
    "kv_events:replays": "gaps closed by a replay",
    "kv_events:replay_timeouts": "replays that got no answer in time",
    "kv_events:lost": "gaps that stayed open, so that the engine's blocks were forgotten",
    "kv_events:restarts": "engines whose numbering began again",
    "kv_events:disconnects": "connections to engines lost",
    "redis_up": "1 while Redis answers",
    "redis_failures": "calls to Redis that failed",
    "redis_unshared_members": "members that Redis does not know yet",
    "lookups_without_redis": "look-ups answered from this conductor's own reports",
}

WORKER = {
    "requests": "requests admitted",
    "refused": "requests refused because too many run",
    "miss:REASON": "reads that a node declined, by reason; the rest was computed",
    "fallback:REASON": "reads that failed, by reason; the rest was computed",
    "store_declined:CODE": "prompts not stored because no slots could be reserved, by code of "
    "the error",
    "store_failed:CODE": "prompts not stored because the commit failed, by code of the error",
    "bytes_read:TRANSPORT": "bytes read from the pool, by transport",
}

TABLES = {"Nodes": NODE, "Conductors": CONDUCTOR, "Workers": WORKER}


def markdown() -> str:
    """The tables of all counters, as docs/monitoring.md has them."""
    parts = []
    for title, counters in TABLES.items():
        rows = "\n".join(f"| `{name}` | {text} |" for name, text in counters.items())
        parts.append(f"### {title}\n\n| counter | what it counts |\n| --- | --- |\n{rows}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    print(markdown(), end="")
