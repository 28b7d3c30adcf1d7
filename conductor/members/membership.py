"""Who is in the pool: nodes and workers by UUID and epoch, and whether they can be chosen now.

A member is live, suspect (silent for a while: not chosen, but its blocks stay known) or dead (removed);
draining is live without new work. An older epoch is refused; a newer one voids what the older one said.
For nodes it also watches the numbering of event batches, and asks for a full report on any gap.

It is not the index (`conductor.index`) and does not talk to anybody. Pure: `now` is monotonic seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, TypeVar

from kvpool.errors import InvalidArgument, NotFound, StaleEpoch

D = TypeVar("D")  # descriptor: NodeDescriptor or WorkerDescriptor
R = TypeVar("R")  # report of a heartbeat: NodeStatsReply or WorkerLoad

MAX_FENCES = 65_536  # epochs remembered of members that are gone


class State(StrEnum):
    LIVE = "live"
    SUSPECT = "suspect"
    DRAINING = "draining"


@dataclass(slots=True, frozen=True)
class MembershipConfig:
    """Times in seconds.

    Args:
        heartbeat_s: how often members are asked to speak.
        suspect_after_s: silence after which a member is no longer chosen.
        dead_after_s: silence after which it is removed.
        sweep_s: how often `sweep` is meant to run.
        stall_s: a sweep later than this says that we, not the members, stood still.
        isolated_factor: when all members fell silent together, they are kept this many times longer.
        gap_grace_s: how long an event batch that a heartbeat named may be on its way.

    Raises:
        InvalidArgument: a time is not positive, or they are not in ascending order.
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
            raise InvalidArgument(f"isolated_factor is {self.isolated_factor}", hint="at least 1")


@dataclass(slots=True)
class Member(Generic[D, R]):
    """What is known of one member. Read it; only `Membership` changes it."""

    member_id: str
    epoch: int
    descriptor: D
    joined_at: float
    last_seen: float
    report: R | None = None
    reported_at: float = 0.0
    is_silent: bool = False
    is_draining: bool = False
    sequence: int | None = None  # of the last batch; None until the first one after a join
    is_in_snapshot: bool = False
    behind_since: float | None = None  # since when a batch that a heartbeat named is missing
    behind_sequence: int = 0
    via: str = ""  # the conductor that it reports to; "": this one
    session: int = 0  # of its joining there, where several conductors share their state
    beat: int = 0  # changes with each sign of life that the other conductor had

    @property
    def state(self) -> State:
        """Silence outweighs draining: nobody reads from a member that does not speak."""
        if self.is_silent:
            return State.SUSPECT
        return State.DRAINING if self.is_draining else State.LIVE


@dataclass(slots=True, frozen=True)
class Joined:
    """`voided_epoch`: the earlier life that this one ends; all it said is void. None: there was none."""

    voided_epoch: int | None


@dataclass(slots=True, frozen=True)
class BatchAction:
    """What to do with a batch of events: in this order."""

    resync: bool = False  # tell the node to join again; nothing else is to be done
    begin_snapshot: bool = False
    apply: bool = False  # False without `resync`: a repetition, ignored
    end_snapshot: bool = False


@dataclass(slots=True, frozen=True)
class Swept:
    """What a sweep changed. `stalled_s`: by how much deadlines were moved, for we stood still."""

    suspected: list[str] = field(default_factory=list)
    died: list[str] = field(default_factory=list)
    stalled_s: float = 0.0
    is_isolated: bool = False  # all fell silent together: nobody was removed yet


class Membership(Generic[D, R]):
    """Members of one kind (make one for nodes and one for workers)."""

    def __init__(self, config: MembershipConfig, now: float) -> None:
        self.config = config
        self._members: dict[str, Member[D, R]] = {}
        self._fences: dict[str, int] = {}
        self._last_sweep = now

    # ------------------------------------------------------------ what members say

    def join(self, member_id: str, epoch: int, descriptor: D, now: float) -> Joined:
        """A member announces itself, for the first time or again. A full report is expected next.

        For a node, begin the index's snapshot now, so that events which overtake the report are kept.

        Raises:
            StaleEpoch: a later life of this member is known.
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
        return Joined(voided)

    def heartbeat(
        self, member_id: str, epoch: int, now: float, report: R | None = None, sequence: int = 0
    ) -> bool:
        """A sign of life; a suspect of the same epoch is welcome again.

        Args:
            sequence: number of the last event batch that the node sent. Heartbeats may overtake
                batches, so a missing one counts as lost only after `gap_grace_s`.

        Returns:
            True when the member must join again (it is unknown here, or events were lost).

        Raises:
            StaleEpoch: a later life of this member is known.
        """
        member = self._heard(member_id, epoch, now)
        if member is None:
            return True
        if report is not None:
            member.report, member.reported_at = report, now
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
        """Judge the number of an event batch: apply it, ignore it (seen before), or resync (a gap).

        The first batch after a join sets the count. After a gap nothing is applied until the node joins
        again; what was known of it stays, for a stale hit costs only a failed pin.

        Raises:
            StaleEpoch: a later life of this node is known.
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

    def leave(self, member_id: str, epoch: int) -> bool:
        """A member says goodbye. False when it was not known.

        Raises:
            StaleEpoch: a later life of this member is known; it stays.
        """
        self._refuse_older(member_id, epoch)
        return self._members.pop(member_id, None) is not None

    # ------------------------------------------------------------ what other conductors say

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
        """A member as another conductor knows it. It is as old here as its last change of `beat`.

        Returns:
            True when this life of it was not known here.
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
        return is_new

    def keep_mirrored(self, now: float) -> None:
        """Nothing is heard of other conductors: their members do not age meanwhile."""
        for member in self._members.values():
            if member.via:
                member.last_seen = max(now, member.last_seen)

    def forget(self, member_id: str) -> bool:
        """The conductor that a member reported to has removed it. False when it was not known."""
        return self._members.pop(member_id, None) is not None

    # ------------------------------------------------------------ what we decide

    def drain(self, member_id: str, draining: bool = True) -> None:
        """Give the member no new work (or give it some again). Holds until its epoch ends.

        Raises:
            NotFound: no such member.
        """
        member = self._members.get(member_id)
        if member is None:
            raise NotFound(f"no member {member_id}")
        member.is_draining = draining

    def sweep(self, now: float) -> Swept:
        """Suspect the silent, remove the dead. Call it every `sweep_s`.

        A late sweep means that this process stood still and could hear nobody: all deadlines move by the
        delay. When every member fell silent at about the same time, it is most likely our network: they
        become suspect, but are removed only after `isolated_factor` times the usual silence.
        """
        config = self.config
        late_s = now - self._last_sweep - config.sweep_s
        stalled_s = late_s if late_s > config.stall_s else 0.0
        self._last_sweep = max(now, self._last_sweep)
        suspected: list[str] = []
        died: list[str] = []
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
                died.append(member_id)
        return Swept(suspected, died, stalled_s, isolated)

    # ------------------------------------------------------------ answers

    def get(self, member_id: str) -> Member[D, R] | None:
        return self._members.get(member_id)

    def why_lost(self, member_id: str, epoch: int) -> str:
        """Why no answer is to be expected from this life of a member; "" when one is."""
        member = self._members.get(member_id)
        if member is None:
            return "left or died"
        if member.epoch != epoch:
            return "restarted"
        return "fell silent" if member.is_silent else ""

    def members(self) -> list[Member[D, R]]:
        """All of them, in order of their ids."""
        return [self._members[member_id] for member_id in sorted(self._members)]

    def choosable(self) -> list[Member[D, R]]:
        """Those that may be given new work: live, neither suspect nor draining."""
        return [member for member in self.members() if member.state is State.LIVE]

    def readable(self) -> list[Member[D, R]]:
        """Those whose blocks may be read: all but the suspect."""
        return [member for member in self.members() if not member.is_silent]

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Member[D, R]]:
        return iter(self.members())

    # ------------------------------------------------------------ inside

    def _heard(self, member_id: str, epoch: int, now: float) -> Member[D, R] | None:
        """The member, with its silence ended; None when this life of it has not joined here."""
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
                hint="a later process uses this id; this one must stop",
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

    def _is_isolated(self) -> bool:
        """Did two or more, and all of them, fall silent within a heartbeat's uncertainty?"""
        members = list(self._members.values())
        if len(members) < 2 or not all(member.is_silent for member in members):
            return False
        seen = [member.last_seen for member in members]
        return max(seen) - min(seen) <= 2 * self.config.heartbeat_s
