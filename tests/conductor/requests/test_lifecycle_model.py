"""Random walks through `RequestLifecycle`, checked action by action by an independent model."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.support.request_model import Walk, World
from tests.support.sizes import scaled

WALKS = scaled(400, 20_000)


@pytest.fixture(scope="module")
def worlds() -> list[World]:
    return [Walk(seed).run() for seed in range(WALKS)]


def test_every_walk_keeps_every_promise(worlds: list[World]) -> None:
    assert len(worlds) == WALKS


def test_the_walks_see_every_kind_of_end_and_of_fallback(worlds: list[World]) -> None:
    ends = Counter(world.finish.status for world in worlds if world.finish)
    assert min(ends[status] for status in ("ok", "failed", "cancelled", "refused")) >= 5
    fallbacks = Counter(reason.partition(":")[0] for world in worlds for reason in world.fallbacks)
    assert min(fallbacks[kind] for kind in ("prefill", "decode", "pool_read")) >= 5


def test_a_request_without_trouble_looks_the_chain_up_once(worlds: list[World]) -> None:
    calm = [w for w in worlds if not w.failed_calls and not w.stores_itself and w.finish]
    assert len(calm) > 20
    assert {world.look_ups for world in calm} == {0}  # beside the one of its plan
