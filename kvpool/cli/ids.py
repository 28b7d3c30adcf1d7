"""Ids of members on the command line: found by their beginning, and shown short."""

from __future__ import annotations

from kvpool.errors import InvalidArgument, NotFound


def full_id(given: str, known: list[str]) -> str:
    """The one node id that `given` is or begins.

    Raises:
        InvalidArgument: it begins several. NotFound: it begins none.
    """
    if given in known:
        return given
    found = [node_id for node_id in known if node_id.startswith(given)]
    if len(found) > 1:
        raise InvalidArgument(f"{given!r} begins the ids of {len(found)} nodes: {sorted(found)}")
    if not found or not given:
        raise NotFound(f"the pool has no node {given!r}", hint="see `kvpool stats`")
    return found[0]


def short_id(member_id: str, length: int) -> str:
    """As much of a node's or worker's id as a table shows: of a plain engine server its whole address."""
    address = member_id.removeprefix("engine-")
    return address if address != member_id else member_id[:length]
