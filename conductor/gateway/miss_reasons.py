"""Why blocks of a prompt were not reused: a reason for each that had to be computed. Pure.

    never_stored      nobody has told of it, or so long ago that it was forgotten
    other_namespace   the same tokens stand under another revision, layout or hash algorithm of this model
    evicted           it was removed where it stood
    node_gone         the node that had it left, fell silent, or could not be reached
    suspect           a read of it failed a moment ago, and it is not planned again yet
    after_gap         it stands somewhere, but a block before it does not
    declined_cost     computing it was predicted, or found, to be faster than reading it
    deadline          there was no time left to read it, or the lease ended first
    checksum          its bytes were not those committed; it was dropped
    read_failed       the read failed for another reason (named in `detail`)

Other namespaces are looked at only where tenant and salt are the same: nobody learns what others stored.
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
    "never_stored": "evicted",  # the index knew it: it went in between
    "miss": "evicted",
    "not_in_index": "evicted",
    "unavailable": "node_gone",
    "transfer_failed": "node_gone",
    "stale_epoch": "node_gone",
    "draining": "node_gone",
    "failed_recently": "suspect",
}
READ = "pool_read:"  # how a worker begins its reason for reading less than planned


@dataclass(slots=True, frozen=True)
class Miss:
    """So many blocks of a prompt, in order, that were missed for one reason."""

    reason: str
    blocks: int
    detail: str = ""


def unknown(
    hashes: Sequence[bytes],
    found: int,
    news: Callable[[bytes], LastEvent | None],
    is_readable: Callable[[str], bool],
) -> list[Miss]:
    """Reasons for the blocks behind the leading run of `found`, by what was last heard of each.

    Args:
        is_readable: whether a node could be read from now.
    """

    def reason(number: int) -> str:
        last = news(hashes[number])
        if last is None:
            return "never_stored"
        if last.kind == "removed":
            return "evicted"
        if not is_readable(last.node_id):
            return "node_gone"
        return "suspect" if number == found else "after_gap"

    reasons = groupby(map(reason, range(found, len(hashes))))
    return [Miss(name, sum(1 for _ in run)) for name, run in reasons]


def elsewhere(misses: Sequence[Miss], fields: str) -> list[Miss]:
    """The same, when the first block stands in another namespace that differs in `fields`."""
    return [
        Miss("other_namespace", miss.blocks, fields) if miss.reason == "never_stored" else miss
        for miss in misses
    ]


def differing(ours: Namespace, theirs: Namespace) -> str:
    """Names of the fields in which they differ, without values. Tenant and salt are never compared."""
    fields = [f for f in ("revision", "hash_algorithm") if getattr(ours, f) != getattr(theirs, f)]
    fields += [
        f"layout.{field}"
        for field in ours.layout.__struct_fields__
        if getattr(ours.layout, field) != getattr(theirs.layout, field)
    ]
    return ", ".join(fields)


def not_reused(found: int, planned: int, reused: int, fallback: str) -> list[Miss]:
    """Reasons for the blocks that the pool had: declined by plan, or planned and not read.

    Args:
        found: leading blocks that the pool had when it was decided.
        planned: of them, those that were to be reused.
        reused: those that were.
        fallback: the worker's reason for reading less than it was told to, if it did.
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
