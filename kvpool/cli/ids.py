"""Ids of nodes and workers: complete them from a prefix, and shorten them for tables."""

from __future__ import annotations

from kvpool.errors import InvalidArgument, NotFound


def full_id(given: str, known: list[str]) -> str:
    """The one known node id that equals `given` or starts with it.

    Raises:
        InvalidArgument: several ids start with it.
        NotFound: none does.
    """
    if given in known:
        return given
    found = [node_id for node_id in known if node_id.startswith(given)]
    if len(found) > 1:
        raise InvalidArgument(
            f"the ids of {len(found)} nodes start with {given!r}: {sorted(found)}"
        )
    if not found or not given:
        raise NotFound(f"the pool has no node {given!r}", hint="see `kvpool stats`")
    return found[0]


def short_id(member_id: str, length: int) -> str:
    """The first `length` characters of an id; for an engine server its whole address."""
    address = member_id.removeprefix("engine-")
    return address if address != member_id else member_id[:length]
