"""Naming a node on the command line by the beginning of its id."""

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
