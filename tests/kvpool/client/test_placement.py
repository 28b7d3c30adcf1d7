"""Where a client puts blocks: by room, by age, on this host first, and copies on other hosts."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from kvpool.client.node.placement import (
    RAMP_S,
    choose_nodes,
    nodes_for_tenant,
    rank_nodes,
    replica_targets,
    weight,
)
from kvpool.wire.messages import NodeDescriptor, NodeInfo

GIB = 1 << 30


def node(
    name: str,
    *,
    host: str = "",
    free: int = GIB,
    size: int = 10 * GIB,
    age_s: float = 1e6,
    state: str = "live",
) -> NodeInfo:
    return NodeInfo(NodeDescriptor(name, 1, host or name, "a:1"), state, free, size, age_s)


def shares(nodes: list[NodeInfo], keys: int = 4000) -> dict[str, float]:
    """How often each node is the first choice."""
    first = Counter(rank_nodes(nodes, b"%d" % i)[0].descriptor.node_id for i in range(keys))
    return {n.descriptor.node_id: first[n.descriptor.node_id] / keys for n in nodes}


def test_equal_keys_go_to_equal_nodes_whatever_the_order_of_the_list() -> None:
    nodes = [node(name) for name in "abcdef"]
    for key in (b"1", b"2", b"3"):
        assert rank_nodes(nodes, key) == rank_nodes(nodes[::-1], key)
    assert len({rank_nodes(nodes, b"%d" % i)[0].descriptor.node_id for i in range(60)}) == 6


def test_writes_follow_the_room() -> None:
    # 1 + 2 and 4 + 2 GiB: a fifth of each node's size counts as free, because it can evict.
    found = shares([node("small", free=GIB), node("large", free=4 * GIB)])
    assert found["small"] == pytest.approx(1 / 3, abs=0.03)


def test_full_nodes_still_get_writes_beside_an_empty_one() -> None:
    nodes = [node(f"full{i}", free=0) for i in range(4)] + [node("empty", free=10 * GIB)]
    assert shares(nodes)["empty"] == pytest.approx(12 / 20, abs=0.03)


@pytest.mark.parametrize(("age_s", "part"), [(0.0, 0.02), (RAMP_S / 4, 0.25), (RAMP_S, 1.0)])
def test_a_restarted_node_gets_a_growing_share(age_s: float, part: float) -> None:
    young, old = node("young", age_s=age_s), node("old")
    assert weight(young) == pytest.approx(part * weight(old))
    assert shares([young, old])["young"] == pytest.approx(part / (1 + part), abs=0.03)


def test_a_node_that_has_not_reported_its_room_can_be_chosen() -> None:
    assert rank_nodes([node("new", free=0, size=0, age_s=0)], b"k")


def test_only_live_nodes_are_chosen() -> None:
    nodes = [node("a", state="draining"), node("b", state="suspect"), node("c")]
    assert [n.descriptor.node_id for n in choose_nodes(nodes, b"k")] == ["c"]
    assert choose_nodes(nodes[:2], b"k") == []


def test_the_own_host_comes_first() -> None:
    nodes = [node("far", free=10 * GIB), node("near", host="here", free=0)]
    for i in range(20):
        chosen = choose_nodes(nodes, b"%d" % i, prefer_host="here")
        assert [n.descriptor.node_id for n in chosen] == ["near", "far"]


def test_copies_go_to_hosts_without_one_first() -> None:
    nodes = [
        node("holder", host="h1"),
        node("beside", host="h1", free=10 * GIB),
        node("other", host="h2", free=0),
        node("twin", host="h2", free=0),
        node("third", host="h3", free=0),
    ]
    for i in range(20):
        order = [
            n.descriptor.node_id for n in replica_targets(nodes, b"%d" % i, holder_id="holder")
        ]
        assert {order[0], order[1]} in ({"other", "third"}, {"twin", "third"})
        assert set(order) == {"beside", "other", "twin", "third"}


def test_a_tenant_with_nodes_of_its_own_writes_there_and_others_never_do() -> None:
    shared, own = node("shared"), node("own")
    own = msgspec.structs.replace(
        own, descriptor=msgspec.structs.replace(own.descriptor, tenant="vault")
    )
    assert nodes_for_tenant([shared, own], "vault") == [own]
    for tenant in ("", "acme"):
        assert nodes_for_tenant([shared, own], tenant) == [shared]
    assert nodes_for_tenant([shared], "vault") == [
        shared
    ]  # which refuses, if the tenant is isolated
