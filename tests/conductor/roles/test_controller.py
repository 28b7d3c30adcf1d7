"""When instances change their role: missed objectives, spare instances, and the cooldown."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.roles.controller import Advice, Instance, RoleController, RoleLimits
from kvpool.errors import ConfigError

LIMITS = RoleLimits(window_s=10, min_requests=5, hold_s=3, cooldown_s=20)


def pool(prefill: int = 2, decode: int = 4, running: int = 1, places: int = 8) -> list[Instance]:
    roles = ["prefill"] * prefill + ["decode"] * decode
    return [Instance(f"w{i}", role, running, places) for i, role in enumerate(roles)]


def feed(
    controller: RoleController, now: float, *, late: int = 0, slow: int = 0, good: int = 0
) -> None:
    for _ in range(late):
        controller.ended(now, is_ttft_met=False, is_tpot_met=True)
    for _ in range(slow):
        controller.ended(now, is_ttft_met=True, is_tpot_met=False)
    for _ in range(good):
        controller.ended(now, is_ttft_met=True, is_tpot_met=True)


def test_a_breach_that_lasts_moves_the_least_busy_instance_of_the_other_role() -> None:
    controller = RoleController(LIMITS)
    instances = [*pool(), Instance("idle", "decode", 0, 8)]
    feed(controller, 0.0, late=5, good=5)
    assert controller.step(instances, 0.0).move is None
    assert controller.step(instances, 2.9).move is None
    move = controller.step(instances, 3.0).move
    assert move is not None
    assert (move.worker_id, move.role) == ("idle", "prefill")
    assert "TTFT" in move.reason


def test_slow_decoding_takes_from_prefill() -> None:
    controller = RoleController(LIMITS)
    feed(controller, 0.0, slow=5, good=5)
    controller.step(pool(), 0.0)
    move = controller.step(pool(), 3.0).move
    assert move is not None
    assert move.role == "decode"


def test_a_breach_that_ends_starts_anew() -> None:
    controller = RoleController(RoleLimits(window_s=2, min_requests=5, hold_s=3, cooldown_s=20))
    feed(controller, 0.0, late=9)
    controller.step(pool(), 0.0)
    feed(controller, 2.5, good=200)
    assert controller.step(pool(), 2.5).move is None
    feed(controller, 5.0, late=200)
    assert controller.step(pool(), 5.0).move is None  # the breach is of now, not of 0.0
    feed(controller, 8.0, late=50)
    assert controller.step(pool(), 8.0).move is not None


def test_nothing_moves_soon_after_a_move() -> None:
    controller = RoleController(LIMITS)
    moves = []
    for second in range(60):
        feed(controller, second, late=5)
        move = controller.step(pool(), second).move
        if move is not None:
            moves.append(second)
    assert len(moves) >= 2
    assert all(b - a >= LIMITS.cooldown_s for a, b in itertools.pairwise(moves))


@pytest.mark.parametrize(
    ("instances", "why"),
    [
        (pool(prefill=2, decode=1), "the last one stays"),
        (pool(running=8), "the rest could not carry the load"),
        ([Instance("b", "both", 0, 8), *pool(decode=0)], "both is no role to take from"),
        ([Instance("f", "decode", 0, 8, 0, False)] * 2, "their roles are fixed"),
    ],
)
def test_an_instance_that_its_role_needs_is_not_moved(instances: list[Instance], why: str) -> None:
    controller = RoleController(LIMITS)
    feed(controller, 0.0, late=10)
    controller.step(instances, 0.0)
    assert controller.step(instances, 5.0).move is None, why


def test_both_objectives_missed_moves_nothing_and_asks_for_more_of_both() -> None:
    controller = RoleController(LIMITS)
    feed(controller, 0.0, late=5, slow=5)
    controller.step(pool(), 0.0)
    decision = controller.step(pool(), 5.0)
    assert decision.move is None
    assert {(a.role, a.change) for a in decision.advice} == {("prefill", 1), ("decode", 2)}


def test_an_idle_pool_that_meets_its_objectives_may_shrink_but_never_to_nothing() -> None:
    controller = RoleController(LIMITS)
    feed(controller, 0.0, good=20)
    advice = controller.step(pool(running=0), 0.0).advice
    assert {(a.role, a.change) for a in advice} == {("prefill", -1), ("decode", -1)}
    assert controller.step(pool(prefill=1, decode=1, running=0), 0.0).advice == ()
    busy = controller.step(pool(running=6), 0.0).advice
    assert busy == ()


def test_few_requests_change_nothing() -> None:
    controller = RoleController(LIMITS)
    feed(controller, 0.0, late=4)
    controller.step(pool(), 0.0)
    decision = controller.step(pool(), 5.0)
    assert (decision.move, decision.advice) == (None, ())
    assert decision.requests == 4


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 20)), max_size=60),
    st.integers(0, 3),
    st.integers(0, 3),
)
def test_no_load_ever_empties_a_role(
    loads: list[tuple[int, int, int]], prefill: int, decode: int
) -> None:
    controller = RoleController(LIMITS)
    roles = {f"w{i}": "prefill" if i < prefill else "decode" for i in range(prefill + decode)}
    had = set(roles.values())
    for second, (late, slow, good) in enumerate(loads):
        feed(controller, second, late=late, slow=slow, good=good)
        move = controller.step([Instance(w, r, 1, 8) for w, r in roles.items()], second).move
        if move is not None:
            assert roles[move.worker_id] != move.role
            roles[move.worker_id] = move.role
        assert had <= set(roles.values())


def test_limits_that_make_no_sense_are_refused() -> None:
    for wrong in ({"low": 0.2}, {"idle": 0.9}, {"hold_s": 0}, {"min_prefill": -1}):
        with pytest.raises(ConfigError):
            RoleLimits(**wrong)


def test_advice_says_why() -> None:
    controller = RoleController(LIMITS)
    feed(controller, 0.0, late=5, good=5)
    [advice] = controller.step(pool(), 0.0).advice
    assert advice == Advice("prefill", 1, "50% of requests miss their TTFT")
