"""Leases: who reads which blocks, and until when.

A lease ends for its holder at the deadline that was announced. Its blocks stay pinned for `grace_s`
longer, because a one-sided read may still be in flight (invariant 3). `now` is an argument, in
monotonic seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from kvpool.blocks.tier import Tier
from kvpool.errors import LeaseExpired
from tiers.store.block_table import BlockTable
from tiers.store.blocks import NEVER, Copy, Space
from tiers.store.config import StoreConfig
from tiers.store.slab_allocator import StoreCorrupt


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
        table: counts the pins.
        config: the grace, the longest lease, and the number of the first one.
    """

    def __init__(self, table: BlockTable, config: StoreConfig) -> None:
        self._table = table
        self._config = config
        self._grace_s = config.grace_s
        self._next_id = config.first_id
        self._leases: dict[int, Lease] = {}
        self._by_holder: dict[str, set[int]] = {}
        # (time of the next look, lease): the entry of a renewed lease comes up early and is put
        # back.
        self._due: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._leases)

    def values(self) -> list[Lease]:
        """All leases, in force or in grace."""
        return list(self._leases.values())

    def holder_of(self, lease_id: int) -> str | None:
        """The holder of a lease; None if there is no such lease."""
        lease = self._leases.get(lease_id)
        return lease.holder_id if lease is not None else None

    def grant(self, space: Space, copies: list[Copy], holder_id: str, deadline: float) -> int:
        """Pin the copies of a run of one chain and record their use; returns the lease's number."""
        fresh = 0
        in_hbm: list[Copy] = []
        hbm = Tier.HBM
        table = self._table
        tick = table.access_clock.advance(len(copies))  # `touch`, inlined: one pass over the run
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
        self._count_pins(space, fresh - len(in_hbm), len(in_hbm))
        lease_id = self._next_id
        self._next_id += 1
        self._leases[lease_id] = Lease(lease_id, holder_id, copies, deadline)
        self._by_holder.setdefault(holder_id, set()).add(lease_id)
        heappush(self._due, (deadline + self._grace_s, lease_id))
        return lease_id

    def renew(self, lease_id: int, ttl_s: float, now: float) -> float:
        """Extend a lease to `now + ttl_s`; never shortens it. Returns the seconds that are left.

        Args:
            ttl_s: seconds, cut to `max_lease_s`.

        Raises:
            LeaseExpired: it ended, or its deadline has passed (nobody may read during the grace).
            InvalidArgument: `ttl_s` is not positive.
        """
        ttl_s = self._config.lease_ttl(ttl_s)
        lease = self._leases.get(lease_id)
        if lease is None or now >= lease.deadline:
            raise lease_over(lease_id)
        lease.deadline = max(lease.deadline, now + ttl_s)
        return lease.deadline - now

    def release(self, lease_id: int) -> bool:
        """End a lease whose holder reads no more; False if there is no such lease."""
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return False
        holder = self._by_holder[lease.holder_id]
        holder.discard(lease_id)
        if not holder:
            del self._by_holder[lease.holder_id]
        self._unpin(lease.copies)
        if len(self._due) > 1024 and len(self._due) > 2 * len(self._leases):
            self._due = [(le.deadline + self._grace_s, i) for i, le in self._leases.items()]
            self._due.sort()
        return True

    def holder_gone(self, holder_id: str, now: float) -> None:
        """The holder is gone, its reads perhaps not: the grace of its leases begins now."""
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

    # ------------------------------------------------------------ within

    def _unpin(self, copies: Sequence[Copy]) -> None:
        """Remove one pin from the copies of a run of one namespace."""
        if not copies:
            return
        space = copies[0].block.space
        tiers = self._table.tiers
        policies = {index: tier.queue(space).policy for index, tier in tiers.items()}
        freed = freed_of_hbm = 0
        for copy in copies:
            copy.pins -= 1
            if copy.pins:
                continue
            freed += 1
            if copy.tier == Tier.HBM:
                freed_of_hbm += 1
            block = copy.block
            if block.copies[copy.tier] is not copy:
                raise StoreCorrupt(f"pinned block {block.name.hex()} left {copy.tier}")
            # Most copies never came up for eviction while they were pinned, and still have their
            # rank.
            if (
                block.is_detached
                or block.retained_until != NEVER
                or copy not in policies[copy.tier]
            ):
                self._table.settle_state(copy)
        self._count_pins(space, freed_of_hbm - freed, -freed_of_hbm)

    def _count_pins(self, space: Space, of_dram: int, of_hbm: int) -> None:
        """So many more copies of each tier are pinned; fewer if negative."""
        for index, count in ((Tier.DRAM, of_dram), (Tier.HBM, of_hbm)):
            if count:
                tier = self._table.tiers[index]
                tier.pinned_bytes += count * space.slot_bytes[index] * space.tp_size


def lease_over(lease_id: int) -> LeaseExpired:
    """The error for a lease that ended or never existed."""
    return LeaseExpired(f"lease {lease_id} is over", hint="discard what was read and pin again")
