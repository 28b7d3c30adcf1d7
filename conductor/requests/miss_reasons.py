"""Why blocks of a prompt were not reused: a reason for each block that had to be computed. Pure.

    never_stored      no node ever reported the block, or too long ago to remember
    other_namespace   the pool has the same tokens under another revision, layout or hash algorithm
    evicted           the node evicted the block
    node_gone         the node that had the block left, went silent or could not be reached
    suspect           a read of the block failed recently, so it is not planned again yet
    after_gap         the pool has the block, but not a block before it
    declined_cost     computing the block was predicted, or measured, to be faster than reading it
    deadline          no time was left to read the block, or its lease ended first
    checksum          the block's bytes did not match its checksum; the block was dropped
    read_failed       the read failed for another reason (see `detail`)

Only namespaces of the same tenant and salt are searched, so that nobody learns what others stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from conductor.index.block_history import LastEvent
from kvpool.blocks.layout import Namespace

_OF_READ = {
    "checksum": "checksum",
    "declined_cost": "declined_cost",
    "declined_deadline": "deadline",
    "deadline": "deadline",
    "lease_expired": "deadline",
    "evicted": "evicted",
    "never_stored": "evicted",  # the index had it: it left in between
    "miss": "evicted",
    "not_in_index": "evicted",
    "unavailable": "node_gone",
    "transfer_failed": "node_gone",
    "stale_epoch": "node_gone",
    "draining": "node_gone",
    "failed_recently": "suspect",
}
# A worker did not read blocks that are there: computing was faster, or no time was left.
DECLINED = frozenset(("declined_cost", "declined_deadline"))
READ = "pool_read:"  # prefix of a worker's reason for reading less than planned


@dataclass(slots=True, frozen=True)
class Miss:
    """A run of blocks of a prompt that were missed for one reason."""

    reason: str
    blocks: int
    detail: str = ""


def of_unknown_blocks(
    hashes: Sequence[bytes],
    found: int,
    last_event: Callable[[bytes], LastEvent | None],
    is_readable: Callable[[str], bool],
) -> list[Miss]:
    """Reasons for the blocks after the first `found`, from the last event of each block.

    Args:
        is_readable: whether a node can be read from now.
    """

    def reason(number: int) -> str:
        last = last_event(hashes[number])
        if last is None:
            return "never_stored"
        if last.kind == "removed":
            return "evicted"
        if not is_readable(last.node_id):
            return "node_gone"
        return "suspect" if number == found else "after_gap"

    reasons = groupby(map(reason, range(found, len(hashes))))
    return [Miss(name, sum(1 for _ in run)) for name, run in reasons]


def in_other_namespace(misses: Sequence[Miss], fields: str) -> list[Miss]:
    """Replace "never_stored" by "other_namespace".

    `fields` names how the other namespace differs.
    """
    return [
        Miss("other_namespace", miss.blocks, fields) if miss.reason == "never_stored" else miss
        for miss in misses
    ]


def differing_fields(ours: Namespace, theirs: Namespace) -> str:
    """Names of the fields that differ, without values. Tenant and salt are never compared."""
    fields = [f for f in ("revision", "hash_algorithm") if getattr(ours, f) != getattr(theirs, f)]
    fields += [
        f"layout.{field}"
        for field in ours.layout.__struct_fields__
        if getattr(ours.layout, field) != getattr(theirs.layout, field)
    ]
    return ", ".join(fields)


def of_known_blocks(found: int, planned: int, reused: int, fallback: str) -> list[Miss]:
    """Reasons for blocks that the pool had: not planned, or planned but not read.

    Args:
        found: leading blocks that the pool had at the decision.
        planned: how many of them the decision planned to reuse.
        reused: how many were reused.
        fallback: the worker's reason for reading less than planned, or "".
    """
    misses = []
    lost = min(planned, found) - reused
    if lost > 0 and fallback.startswith(READ):
        cause = fallback.removeprefix(READ)
        known = _OF_READ.get(cause, "read_failed")
        misses.append(Miss(known, lost, "" if known == cause else cause))
    declined = found - max(planned, reused)
    if declined > 0:
        misses.append(Miss("declined_cost", declined))
    return misses
