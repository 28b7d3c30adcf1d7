"""Membership: silence, epochs, gaps, draining, and stalls of this process."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.members.membership import BatchAction, Membership, MembershipConfig, State
from kvpool.errors import InvalidArgument, NotFound, StaleEpoch

CONFIG = MembershipConfig(
    heartbeat_s=1, suspect_after_s=3, dead_after_s=10, sweep_s=1, stall_s=1, gap_grace_s=2
)
Members = Membership[str, str]


def pool(*ids: str) -> Members:
    members = Members(CONFIG, now=0.0)
    for member_id in ids:
        members.join(member_id, 1, f"descriptor of {member_id}", 0.0)
    return members


def run(members: Members, start: int, end: int, speaking: tuple[str, ...]) -> list[str]:
    """In each second of [start, end), `speaking` send heartbeats, then a sweep. Return the dead."""
    died: list[str] = []
    for second in range(start, end):
        for member_id in speaking:
            members.heartbeat(member_id, 1, float(second))
        died += [member.member_id for member in members.sweep(float(second)).died]
    return died


def state_of(members: Members, member_id: str) -> State | None:
    member = members.get(member_id)
    return member.state if member is not None else None


# ------------------------------------------------------------ silence


def test_a_silent_member_is_suspect_then_dead() -> None:
    members = pool("a", "b")
    assert run(members, 1, 3, ("a",)) == []
    assert state_of(members, "b") is State.LIVE
    run(members, 3, 4, ("a",))
    assert state_of(members, "b") is State.SUSPECT
    assert [m.member_id for m in members.choosable()] == ["a"]
    assert [m.member_id for m in members.readable()] == ["a"]
    assert len(members) == 2
    assert run(members, 4, 11, ("a",)) == ["b"]
    assert state_of(members, "a") is State.LIVE


def test_a_suspect_of_the_same_epoch_becomes_live_again() -> None:
    members = pool("a", "b")
    run(members, 1, 6, ("a",))
    assert members.heartbeat("b", 1, 6.0) is False
    assert state_of(members, "b") is State.LIVE


def test_a_dead_member_is_asked_to_join_again() -> None:
    members = pool("a", "b")
    run(members, 1, 12, ("a",))
    assert members.heartbeat("b", 1, 12.0) is True
    assert members.receive_events("b", 1, 9, 12.0) == BatchAction(resync=True)
    members.join("b", 1, "b", 12.0)
    assert state_of(members, "b") is State.LIVE


def test_events_are_a_sign_of_life_too() -> None:
    members = pool("a", "b")
    run(members, 1, 6, ("a",))
    members.receive_events("b", 1, 1, 6.0)
    assert state_of(members, "b") is State.LIVE


# ------------------------------------------------------------ stalls of this process


def test_a_stall_of_the_conductor_expires_nobody() -> None:
    members = pool("a", "b", "c")
    run(members, 1, 3, ("a", "b", "c"))
    swept = members.sweep(60.0)  # 57 s late, no heartbeat could be heard
    assert swept.stalled_s == pytest.approx(57.0)
    assert (swept.suspected, swept.died) == ([], [])
    assert len(members.choosable()) == 3


def test_a_member_that_was_silent_before_a_stall_does_not_gain_a_life() -> None:
    members = pool("a", "b")
    run(members, 1, 9, ("a",))
    members.sweep(60.0)
    assert state_of(members, "b") is State.SUSPECT
    assert run(members, 61, 64, ("a",)) == ["b"]


def test_heartbeats_heard_after_a_stall_are_not_moved_into_the_future() -> None:
    members = pool("a", "b")
    run(members, 1, 3, ("a", "b"))
    members.heartbeat("a", 1, 60.0)
    members.sweep(60.0)
    died = run(members, 61, 71, ("b",))
    assert died == ["a"]


def test_when_all_fall_silent_together_they_are_kept_for_longer() -> None:
    members = pool("a", "b", "c")
    assert run(members, 1, 60, ()) == []
    assert {m.state for m in members} == {State.SUSPECT}
    assert members.sweep(60.0).is_isolated
    members.heartbeat("a", 1, 60.0)
    assert state_of(members, "a") is State.LIVE
    assert run(members, 61, 63, ("a",)) == ["b", "c"]


def test_even_isolation_ends() -> None:
    members = pool("a", "b")
    assert sorted(run(members, 1, 102, ())) == ["a", "b"]


def test_members_that_fall_silent_one_after_the_other_do_not_mean_isolation() -> None:
    members = pool("a", "b")
    run(members, 1, 6, ("a",))
    assert run(members, 6, 11, ()) == ["b"]


# ------------------------------------------------------------ epochs


def test_an_older_epoch_is_refused_everywhere() -> None:
    members = Members(CONFIG, now=0.0)
    members.join("a", 2, "new", 0.0)
    with pytest.raises(StaleEpoch):
        members.join("a", 1, "old", 1.0)
    with pytest.raises(StaleEpoch):
        members.heartbeat("a", 1, 1.0)
    with pytest.raises(StaleEpoch):
        members.receive_events("a", 1, 1, 1.0)
    with pytest.raises(StaleEpoch):
        members.leave("a", 1)
    assert len(members) == 1


def test_a_newer_epoch_voids_the_older_life() -> None:
    members = pool("a")
    members.drain("a")
    assert members.join("a", 1, "again", 1.0).voided_epoch is None
    assert state_of(members, "a") is State.DRAINING
    assert members.join("a", 2, "new", 2.0).voided_epoch == 1
    assert state_of(members, "a") is State.LIVE


def test_a_newer_epoch_must_join_before_it_is_heard() -> None:
    members = pool("a")
    assert members.heartbeat("a", 2, 1.0) is True
    assert members.receive_events("a", 2, 1, 1.0).resync


def test_the_epoch_of_one_that_left_stays_known() -> None:
    members = Members(CONFIG, now=0.0)
    members.join("a", 5, "a", 0.0)
    assert members.leave("a", 5)
    assert not members.leave("a", 5)
    with pytest.raises(StaleEpoch):
        members.join("a", 4, "late", 1.0)


# ------------------------------------------------------------ numbering of events


def test_batches_in_order_are_applied_and_repetitions_ignored() -> None:
    members = pool("a")
    first = members.receive_events("a", 1, 1, 0.0, snapshot=True)
    assert first == BatchAction(apply=True)
    last = members.receive_events("a", 1, 2, 0.0, snapshot=True, snapshot_end=True)
    assert last == BatchAction(apply=True, end_snapshot=True)
    assert members.receive_events("a", 1, 3, 0.0) == BatchAction(apply=True)
    assert members.receive_events("a", 1, 3, 0.0) == BatchAction()
    assert members.receive_events("a", 1, 2, 0.0) == BatchAction()


def test_a_gap_asks_for_resync_until_the_node_joins_again() -> None:
    members = pool("a")
    members.receive_events("a", 1, 1, 0.0)
    assert members.receive_events("a", 1, 3, 0.0) == BatchAction(resync=True)
    assert members.receive_events("a", 1, 4, 0.0) == BatchAction(resync=True)
    members.join("a", 1, "a", 1.0)
    action = members.receive_events("a", 1, 5, 1.0, snapshot=True, snapshot_end=True)
    assert action == BatchAction(apply=True, end_snapshot=True)


def test_an_unexpected_report_begins_a_snapshot() -> None:
    members = pool("a")
    members.receive_events("a", 1, 1, 0.0, snapshot=True, snapshot_end=True)
    begun = members.receive_events("a", 1, 2, 0.0, snapshot=True)
    assert begun == BatchAction(begin_snapshot=True, apply=True)
    between = members.receive_events("a", 1, 3, 0.0)
    assert between == BatchAction(apply=True)
    ended = members.receive_events("a", 1, 4, 0.0, snapshot=True, snapshot_end=True)
    assert ended == BatchAction(apply=True, end_snapshot=True)


def test_a_heartbeat_that_overtakes_its_batch_is_no_gap_but_a_lost_batch_is() -> None:
    members = pool("a")
    members.receive_events("a", 1, 1, 0.0)
    assert members.heartbeat("a", 1, 1.0, sequence=2) is False
    members.receive_events("a", 1, 2, 1.5)
    assert members.heartbeat("a", 1, 4.0, sequence=3) is False
    assert members.heartbeat("a", 1, 5.0, sequence=3) is False
    assert members.heartbeat("a", 1, 6.0, sequence=4) is True


@given(st.lists(st.integers(1, 6), max_size=20))
def test_applied_batches_are_always_a_run_without_gaps(sequences: list[int]) -> None:
    members = pool("a")
    applied = [s for s in sequences if members.receive_events("a", 1, s, 0.0).apply]
    start = applied[0] if applied else 0
    assert applied == list(range(start, start + len(applied)))


# ------------------------------------------------------------ draining, reports


def test_a_draining_member_is_read_but_not_chosen_even_after_silence() -> None:
    members = pool("a", "b")
    members.drain("b")
    assert state_of(members, "b") is State.DRAINING
    assert [m.member_id for m in members.choosable()] == ["a"]
    assert [m.member_id for m in members.readable()] == ["a", "b"]
    run(members, 1, 6, ("a",))
    assert state_of(members, "b") is State.SUSPECT
    members.heartbeat("b", 1, 6.0)
    assert state_of(members, "b") is State.DRAINING
    members.drain("b", draining=False)
    assert state_of(members, "b") is State.LIVE


def test_draining_an_unknown_member_is_an_error() -> None:
    with pytest.raises(NotFound):
        pool("a").drain("z")


def test_a_report_is_kept_with_its_time() -> None:
    members = pool("a")
    members.heartbeat("a", 1, 2.0, report="busy")
    members.heartbeat("a", 1, 3.0)
    member = members.get("a")
    assert member is not None
    assert (member.report, member.reported_at, member.last_seen) == ("busy", 2.0, 3.0)


@pytest.mark.parametrize(
    "times",
    [
        {"heartbeat_s": 0.0},
        {"suspect_after_s": 0.5},
        {"dead_after_s": 2.0},
        {"sweep_s": 0.0},
        {"isolated_factor": 0.5},
    ],
)
def test_contradictory_times_are_refused(times: dict[str, float]) -> None:
    with pytest.raises(InvalidArgument):
        MembershipConfig(**times)


# ------------------------------------------------------------ members of other conductors


def mirrored(group: Members, now: float, beat: int, epoch: int = 1, via: str = "other") -> bool:
    return group.mirror(
        "a",
        epoch,
        "descriptor",
        f"load {beat}",
        now,
        via=via,
        session=1,
        beat=beat,
        is_draining=False,
    )


def test_a_mirrored_member_lives_by_its_changes_alone() -> None:
    group = pool()
    assert mirrored(group, 0.0, beat=1)
    assert not mirrored(group, 5.0, beat=1)  # the same record read again is no sign of life
    run(group, 1, 6, ())
    assert group.members()[0].state is State.SUSPECT
    assert not mirrored(group, 6.0, beat=2)
    assert (group.members()[0].state, group.members()[0].report) == (State.LIVE, "load 2")


def test_a_mirrored_member_must_join_to_be_heard_here() -> None:
    group = pool()
    mirrored(group, 0.0, beat=1)
    assert group.heartbeat("a", 1, 1.0)
    assert group.receive_events("a", 1, 1, 1.0).resync
    group.join("a", 1, "descriptor", 2.0)
    assert not group.heartbeat("a", 1, 2.0)
    assert group.members()[0].via == ""


def test_a_mirrored_record_of_an_older_life_is_ignored() -> None:
    group = pool()
    group.join("a", 2, "descriptor", 0.0)
    assert not mirrored(group, 1.0, beat=9, epoch=1)
    assert (group.members()[0].epoch, group.members()[0].via) == (2, "")


def test_mirrored_members_do_not_age_while_nothing_can_be_heard() -> None:
    group = pool()
    mirrored(group, 0.0, beat=1)
    group.join("own", 1, "descriptor", 0.0)
    for now in range(1, 30):
        group.keep_mirrored(float(now))
        group.sweep(float(now))
    assert [member.member_id for member in group] == ["a"]
    assert group.members()[0].state is State.LIVE
