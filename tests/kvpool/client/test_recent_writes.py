"""A client finds its recent writes for a while, unless they proved to be gone."""

from __future__ import annotations

from kvpool.blocks.tier import Tier
from kvpool.client.node.recent_writes import RecentWrites
from kvpool.wire import messages as m

SPACE = b"s" * 16
HASHES = [bytes([number]) * 16 for number in range(6)]
NOTHING = m.LookupReply(0, [])


def places(reply: m.LookupReply) -> list[tuple[str, int, int]]:
    return [(segment.node_id, segment.start, segment.count) for segment in reply.segments]


def test_own_writes_are_found_behind_what_the_index_knows() -> None:
    recent = RecentWrites(ttl_s=3)
    recent.remember("a", SPACE, HASHES[1:3], 0.0)
    recent.remember("b", SPACE, HASHES[3:5], 0.0)
    known = m.LookupReply(1, [m.Segment("c", 0, 1, Tier.NVME)], 0.5)
    reply = recent.extend(known, SPACE, HASHES, 1.0)
    assert (reply.found, reply.wait_s) == (5, 0.5)
    assert places(reply) == [("c", 0, 1), ("a", 1, 2), ("b", 3, 2)]
    assert recent.extend(NOTHING, SPACE, HASHES, 1.0) is NOTHING  # not behind a gap
    assert recent.extend(known, b"t" * 16, HASHES, 1.0) is known  # nor in another namespace


def test_writes_are_forgotten_with_time_and_by_the_oldest() -> None:
    recent = RecentWrites(ttl_s=3, limit=2)
    recent.remember("a", SPACE, HASHES[:3], 0.0)
    assert len(recent) == 2
    assert recent.extend(NOTHING, SPACE, HASHES[1:], 2.9).found == 2
    assert recent.extend(NOTHING, SPACE, HASHES[1:], 3.0).found == 0
    assert len(recent) == 0


def test_what_proved_to_be_gone_is_not_found_again() -> None:
    recent = RecentWrites()
    recent.remember("a", SPACE, HASHES[:2], 0.0)
    recent.remember("b", SPACE, HASHES[2:3], 0.0)
    recent.forget("b", SPACE, HASHES[:2])  # another node than the one that has them
    assert recent.extend(NOTHING, SPACE, HASHES, 0.0).found == 3
    recent.forget("a", SPACE, HASHES[1:2])
    assert recent.extend(NOTHING, SPACE, HASHES, 0.0).found == 1
    recent.forget_node("a")
    assert recent.extend(NOTHING, SPACE, HASHES, 0.0).found == 0
    recent.forget(None, SPACE, HASHES)
    assert len(recent) == 0


def test_single_blocks_are_known_whatever_comes_before_them() -> None:
    recent = RecentWrites(ttl_s=3)
    recent.remember("a", SPACE, HASHES[1:2], 0.0)
    assert recent.contains(SPACE, HASHES[:3], 1.0) == [False, True, False]
    assert recent.contains(SPACE, HASHES[:3], 3.0) == [False] * 3
