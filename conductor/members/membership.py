"""The members of the pool: nodes and workers by id and epoch, and their states. Pure.

A member is live, draining (gets no new work) or suspect (silent for a while: it gets no work, but
its blocks stay in the index). A dead member is removed and has no state. Messages of an older epoch are refused. A newer epoch
invalidates what the member said under the older one. For nodes, the sequence numbers of event
batches are checked, and a gap makes the node send a full report. `now` is monotonic seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, TypeVar

from kvpool.errors import InvalidArgument, NotFound, StaleEpoch

D = TypeVar("D")  # descriptor: NodeDescriptor or WorkerDescriptor
R = TypeVar("R")  # report of a heartbeat: NodeStatsReply or WorkerLoad

MAX_FENCES = 65_536  # epochs of members, also of those that left


class State(StrEnum):
    LIVE = "live"
    SUSPECT = "suspect"
    DRAINING = "draining"


@dataclass(slots=True, frozen=True)
class MembershipConfig:
    """Times in seconds.

    Args:
        heartbeat_s: interval at which members send heartbeats.
        suspect_after_s: silence after which a member becomes suspect.
        dead_after_s: silence after which it is removed.
        sweep_s: interval at which `sweep` should run.
        stall_s: a sweep that is late by more than this means that this process was stopped, not the
            members.
        isolated_factor: if all members fall silent together, they are kept this many times longer.
        gap_grace_s: how long an event batch that a heartbeat announced may take to arrive.

    Raises:
        InvalidArgument: a time is not positive, or the times are not in ascending order.
    """

    heartbeat_s: float = 1.0
    suspect_after_s: float = 4.0
    dead_after_s: float = 20.0
    sweep_s: float = 1.0
    stall_s: float = 1.0
    isolated_factor: float = 10.0
    gap_grace_s: float = 5.0

    def __post_init__(self) -> None:
        if not 0 < self.heartbeat_s < self.suspect_after_s < self.dead_after_s:
            raise InvalidArgument(
                f"heartbeat_s {self.heartbeat_s}, suspect_after_s {self.suspect_after_s} and "
                f"dead_after_s {self.dead_after_s} must be positive and ascending"
            )
        if not (self.sweep_s > 0 and self.stall_s > 0 and self.gap_grace_s > 0):
            raise InvalidArgument("sweep_s, stall_s and gap_grace_s must be positive")
        if not self.isolated_factor >= 1:
            raise InvalidArgument(
                f"isolated_factor is {self.isolated_factor}", hint="use at least 1"
            )


@dataclass(slots=True)
class Member(Generic[D, R]):
    """One member. Only `Membership` changes it."""

    member_id: str
    epoch: int
    descriptor: D
    joined_at: float
    last_seen: float
    report: R | None = None
    reported_at: float = 0.0
    is_silent: bool = False
    is_draining: bool = False
    sequence: int | None = None  # of the last batch; None before the first one after a join
    is_in_snapshot: bool = False
    behind_since: float | None = None  # since when a batch that a heartbeat announced is missing
    behind_sequence: int = 0
    via: str = ""  # the conductor that it reports to; "" is this one
    session: int = 0  # number of its join there, if several conductors share their state
    beat: int = 0  # the other conductor changes it with each sign of life

    @property
    def state(self) -> State:
        """A silent member is suspect even if it is draining: nothing is read from it."""
        if self.is_silent:
            return State.SUSPECT
        return State.DRAINING if self.is_draining else State.LIVE


@dataclass(slots=True, frozen=True)
class Joined:
    """The result of a join. `voided_epoch` is the earlier epoch that it replaces; None if none."""

    voided_epoch: int | None


@dataclass(slots=True, frozen=True)
class BatchAction:
    """What to do with a batch of events, in this order."""

    resync: bool = False  # make the node join again, and do nothing else
    begin_snapshot: bool = False
    apply: bool = False  # if False without `resync`, the batch is a repetition
    end_snapshot: bool = False


@dataclass(slots=True, frozen=True)
class Swept:
    """What a sweep changed.

    `stalled_s`: how far deadlines moved, because this process was stopped.
    """

    suspected: list[str] = field(default_factory=list)
    died: list[Member[Any, Any]] = field(default_factory=list)
    stalled_s: float = 0.0
    is_isolated: bool = False  # all fell silent together, so none was removed yet


class Membership(Generic[D, R]):
    """The members of one kind, nodes or workers.

    `listeners` are called when a member joined, reported, left or began to drain.
    """

    def __init__(self, config: MembershipConfig, now: float) -> None:
        self.config = config
        self.listeners: list[Callable[[], None]] = []
        self._members: dict[str, Member[D, R]] = {}
        self._fences: dict[str, int] = {}
        self._last_sweep = now

    # ------------------------------------------------------------ reports of members

    def join(self, member_id: str, epoch: int, descriptor: D, now: float) -> Joined:
        """Add a member, or restart its session. Its full report follows.

        For a node, the caller begins the index's snapshot now, so that events that overtake the
        report are kept.

        Raises:
            StaleEpoch: a newer epoch of this member is known.
        """
        self._refuse_older(member_id, epoch)
        old = self._members.get(member_id)
        member = Member[D, R](member_id, epoch, descriptor, now, now, is_in_snapshot=True)
        voided = None
        if old is not None and old.epoch == epoch:
            member.joined_at = old.joined_at
            member.is_draining = old.is_draining
            member.report, member.reported_at = old.report, old.reported_at
        elif old is not None:
            voided = old.epoch
        self._members[member_id] = member
        self._fence(member_id, epoch)
        self._changed()
        return Joined(voided)

    def heartbeat(
        self, member_id: str, epoch: int, now: float, report: R | None = None, sequence: int = 0
    ) -> bool:
        """Record a sign of life. A suspect of the same epoch becomes live again.

        Args:
            sequence: number of the last event batch that the node sent. Heartbeats may overtake
                batches, so a missing batch counts as lost only after `gap_grace_s`.

        Returns:
            Whether the member must join again, because it is unknown here or events were lost.

        Raises:
            StaleEpoch: a newer epoch of this member is known.
        """
        member = self._heard(member_id, epoch, now)
        if member is None:
            return True
        if report is not None:
            member.report, member.reported_at = report, now
            self._changed()
        return self._is_gap_overdue(member, sequence, now)

    def receive_events(
        self,
        node_id: str,
        epoch: int,
        sequence: int,
        now: float,
        *,
        snapshot: bool = False,
        snapshot_end: bool = False,
    ) -> BatchAction:
        """Check the sequence number of an event batch, and say what to do with the batch.

        The first batch after a join sets the number. After a gap no batch is applied until the node
        joins again. Its known blocks stay, because a stale hit costs only a failed pin.

        Raises:
            StaleEpoch: a newer epoch of this node is known.
        """
        member = self._heard(node_id, epoch, now)
        if member is None:
            return BatchAction(resync=True)
        if member.sequence is not None and sequence <= member.sequence:
            return BatchAction()
        if member.sequence is not None and sequence != member.sequence + 1:
            return BatchAction(resync=True)
        member.sequence = sequence
        if member.behind_since is not None and sequence >= member.behind_sequence:
            member.behind_since = None
        begins = snapshot and not member.is_in_snapshot
        ends = snapshot_end and (member.is_in_snapshot or begins)
        member.is_in_snapshot = (member.is_in_snapshot or begins) and not ends
        return BatchAction(begin_snapshot=begins, apply=True, end_snapshot=ends)

    def leave(self, member_id: str, epoch: int) -> Member[D, R] | None:
        """Remove a member that says that it stops, and return it; None if it was unknown.

        Raises:
            StaleEpoch: a newer epoch of this member is known; it stays.
        """
        self._refuse_older(member_id, epoch)
        member = self._members.pop(member_id, None)
        self._changed()
        return member

    # ------------------------------------------------------------ reports of other conductors

    def mirror(
        self,
        member_id: str,
        epoch: int,
        descriptor: D,
        report: R | None,
        now: float,
        *,
        via: str,
        session: int,
        beat: int,
        is_draining: bool,
    ) -> bool:
        """Add or update a member that reports to another conductor.

        A change of `beat` is a sign of life.

        Returns:
            Whether this epoch of it was unknown here.
        """
        if epoch < self._fences.get(member_id, epoch):
            return False
        member = self._members.get(member_id)
        is_new = member is None or member.epoch != epoch
        if member is None or is_new:
            member = Member[D, R](member_id, epoch, descriptor, now, now)
            self._members[member_id] = member
            self._fence(member_id, epoch)
        elif (member.via, member.session, member.beat) == (via, session, beat):
            return False
        member.via, member.session, member.beat = via, session, beat
        member.descriptor, member.report, member.reported_at = descriptor, report, now
        member.last_seen = max(now, member.last_seen)
        member.is_silent = False
        member.is_draining = is_draining
        self._changed()
        return is_new

    def keep_mirrored(self, now: float) -> None:
        """Do not let members of other conductors age while nothing is heard of those conductors."""
        for member in self._members.values():
            if member.via:
                member.last_seen = max(now, member.last_seen)

    def forget(self, member_id: str) -> bool:
        """Remove a member that another conductor has removed; False if it was unknown."""
        return self._members.pop(member_id, None) is not None

    # ------------------------------------------------------------ changes of state

    def drain(self, member_id: str, draining: bool = True) -> None:
        """Set whether the member is draining. This holds until its epoch ends.

        Raises:
            NotFound: no such member.
        """
        member = self._members.get(member_id)
        if member is None:
            raise NotFound(f"no member {member_id}")
        member.is_draining = draining
        self._changed()

    def sweep(self, now: float) -> Swept:
        """Make silent members suspect, and remove dead ones. Call it every `sweep_s`.

        If the sweep is late, this process was stopped and could not hear members, so all deadlines
        move by the delay. If all members fall silent at about the same time, the cause is most
        likely this host's network. They then become suspect, but are removed only after
        `isolated_factor` times the usual silence.
        """
        config = self.config
        late_s = now - self._last_sweep - config.sweep_s
        stalled_s = late_s if late_s > config.stall_s else 0.0
        self._last_sweep = max(now, self._last_sweep)
        suspected: list[str] = []
        died: list[Member[Any, Any]] = []
        for member in self._members.values():
            if stalled_s:
                member.last_seen = min(now, member.last_seen + stalled_s)
                if member.behind_since is not None:
                    member.behind_since = min(now, member.behind_since + stalled_s)
            if now - member.last_seen >= config.suspect_after_s and not member.is_silent:
                member.is_silent = True
                suspected.append(member.member_id)
        isolated = self._is_isolated()
        patience_s = config.dead_after_s * (config.isolated_factor if isolated else 1.0)
        for member_id, member in list(self._members.items()):
            if now - member.last_seen >= patience_s:
                del self._members[member_id]
                died.append(member)
        return Swept(suspected, died, stalled_s, isolated)

    # ------------------------------------------------------------ queries

    def get(self, member_id: str) -> Member[D, R] | None:
        return self._members.get(member_id)

    def why_lost(self, member_id: str, epoch: int) -> str:
        """Why this epoch of a member will not reply; "" if it may."""
        member = self._members.get(member_id)
        if member is None:
            return "left or died"
        if member.epoch != epoch:
            return "restarted"
        return "fell silent" if member.is_silent else ""

    def members(self) -> list[Member[D, R]]:
        """All members, ordered by id."""
        return [self._members[member_id] for member_id in sorted(self._members)]

    def choosable(self) -> list[Member[D, R]]:
        """The members that may get new work: neither suspect nor draining."""
        return [member for member in self.members() if member.state is State.LIVE]

    def readable(self) -> list[Member[D, R]]:
        """The members whose blocks may be read: all that are not suspect."""
        return [member for member in self.members() if not member.is_silent]

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Member[D, R]]:
        return iter(self.members())

    # ------------------------------------------------------------ inside

    def _heard(self, member_id: str, epoch: int, now: float) -> Member[D, R] | None:
        """The member, now not silent; None if this epoch of it has not joined at this conductor."""
        self._refuse_older(member_id, epoch)
        member = self._members.get(member_id)
        if member is None or member.epoch != epoch or member.via:
            return None
        member.last_seen = max(now, member.last_seen)
        member.is_silent = False
        return member

    def _refuse_older(self, member_id: str, epoch: int) -> None:
        known = self._fences.get(member_id, epoch)
        if epoch < known:
            raise StaleEpoch(
                f"member {member_id} is at epoch {known}, message is of {epoch}",
                hint="a newer process uses this id; stop this one",
            )

    def _fence(self, member_id: str, epoch: int) -> None:
        self._fences.pop(member_id, None)
        self._fences[member_id] = epoch
        if len(self._fences) > MAX_FENCES:
            gone = next((m for m in self._fences if m not in self._members), None)
            if gone is not None:
                del self._fences[gone]

    def _is_gap_overdue(self, member: Member[D, R], sequence: int, now: float) -> bool:
        if sequence <= (member.sequence or 0):
            return False
        if member.behind_since is None:
            member.behind_since, member.behind_sequence = now, sequence
            return False
        return now - member.behind_since >= self.config.gap_grace_s

    def _changed(self) -> None:
        for listener in self.listeners:
            listener()

    def _is_isolated(self) -> bool:
        """Whether there are two or more members, and all fell silent within two heartbeats."""
        members = list(self._members.values())
        if len(members) < 2 or not all(member.is_silent for member in members):
            return False
        seen = [member.last_seen for member in members]
        return max(seen) - min(seen) <= 2 * self.config.heartbeat_s
