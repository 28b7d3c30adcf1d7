"""Leases: who reads which blocks, and until when. Pure: `now` is an argument, in monotonic seconds.

A lease ends for its holder at the deadline it was told; its blocks stay pinned `grace_s` longer, because a
one-sided read may still be under way (invariant 3).
"""

from __future__ import annotations

from heapq import heappop, heappush

from kvpool.blocks.tier import Tier
from kvpool.errors import LeaseExpired
from tiers.store.block_table import BlockTable
from tiers.store.blocks import Copy, Space


class Lease:
    """A promise that `copies` keep their places until `deadline`, and `grace_s` beyond."""

    __slots__ = ("copies", "deadline", "holder_id", "lease_id")

    def __init__(self, lease_id: int, holder_id: str, copies: list[Copy], deadline: float) -> None:
        self.lease_id = lease_id
        self.holder_id = holder_id
        self.copies = copies
        self.deadline = deadline  # monotonic seconds, as announced


class LeaseTable:
    """All leases in force or in grace.

    Args:
        residency: where the pins count.
        grace_s: seconds that blocks stay pinned past the deadline announced.
        first_id: number of the first lease.
    """

    def __init__(self, table: BlockTable, grace_s: float, first_id: int) -> None:
        self._table = table
        self._grace_s = grace_s
        self._next_id = first_id
        self._leases: dict[int, Lease] = {}
        self._by_holder: dict[str, set[int]] = {}
        # (when to look again, lease): a renewed lease is looked at early, and put back.
        self._due: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._leases)

    def values(self) -> list[Lease]:
        """All leases, in force or in grace."""
        return list(self._leases.values())

    def holder_of(self, lease_id: int) -> str | None:
        """Who holds a lease; None when there is none."""
        lease = self._leases.get(lease_id)
        return lease.holder_id if lease is not None else None

    def grant(self, space: Space, copies: list[Copy], holder_id: str, deadline: float) -> int:
        """Pin the copies of a run of one chain, note their use, and return the lease's number."""
        fresh = 0
        in_hbm: list[Copy] = []
        hbm = Tier.HBM
        table = self._table
        tick = table.advance(len(copies))  # inlined `touch`: one pass over the run
        for copy in copies:
            copy.block.last_use = tick
            tick -= 1
            if copy.pins:
                copy.pins += 1
            else:
                copy.pins = 1
                fresh += 1
                if copy.tier == hbm:  # rare
                    in_hbm.append(copy)
        if table.wants_uses:
            table.note_uses([copy.block for copy in copies])
        table.note_pins(space, fresh - len(in_hbm), len(in_hbm))
        lease_id = self._next_id
        self._next_id += 1
        self._leases[lease_id] = Lease(lease_id, holder_id, copies, deadline)
        self._by_holder.setdefault(holder_id, set()).add(lease_id)
        heappush(self._due, (deadline + self._grace_s, lease_id))
        return lease_id

    def renew(self, lease_id: int, ttl_s: float, now: float) -> float:
        """Move the deadline to `now + ttl_s`, never to an earlier time; returns seconds from now.

        Raises:
            LeaseExpired: it ended, or its deadline has passed (its grace is not for reading).
        """
        lease = self._leases.get(lease_id)
        if lease is None or now >= lease.deadline:
            raise lease_over(lease_id)
        lease.deadline = max(lease.deadline, now + ttl_s)
        return lease.deadline - now

    def release(self, lease_id: int) -> bool:
        """End a lease at its holder's word that it reads no more; False when there is none."""
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return False
        holder = self._by_holder[lease.holder_id]
        holder.discard(lease_id)
        if not holder:
            del self._by_holder[lease.holder_id]
        self._table.unpin_run(lease.copies)
        if len(self._due) > 1024 and len(self._due) > 2 * len(self._leases):
            self._due = [(le.deadline + self._grace_s, i) for i, le in self._leases.items()]
            self._due.sort()
        return True

    def holder_gone(self, holder_id: str, now: float) -> None:
        """The holder is gone, its reads perhaps not: its leases run into their grace at once."""
        for lease_id in sorted(self._by_holder.get(holder_id, ())):
            lease = self._leases[lease_id]
            lease.deadline = min(lease.deadline, now)
            heappush(self._due, (lease.deadline + self._grace_s, lease_id))

    def expire(self, now: float) -> int:
        """End the leases whose deadline and grace have passed; returns how many."""
        ended = 0
        while self._due and self._due[0][0] <= now:
            _, lease_id = heappop(self._due)
            lease = self._leases.get(lease_id)
            if lease is None:
                continue
            end = lease.deadline + self._grace_s
            if end > now:
                heappush(self._due, (end, lease_id))
                continue
            self.release(lease_id)
            self._table.counters["leases_expired"] += 1
            ended += 1
        return ended


def lease_over(lease_id: int) -> LeaseExpired:
    """What is said of a lease that ended or never was."""
    return LeaseExpired(f"lease {lease_id} is over", hint="discard what was read and pin again")
