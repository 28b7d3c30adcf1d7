"""Holding a chain in place on whichever nodes have it, and reading what is held. A node that failed is not asked again
for a while.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvpool.blocks.layout import Namespace
from kvpool.blocks.resharding import Plan, plan_part
from kvpool.client.data.buffers import placed
from kvpool.client.data.reading import MIN_WAIT_S
from kvpool.client.node.deadlines import time_left
from kvpool.client.node.node_link import BlockChecksumMismatch, NodeLink, ReadLease
from kvpool.errors import InvalidArgument, KvpoolError, LeaseExpired
from kvpool.transports.copy import Int64Array
from kvpool.wire import messages as m

if TYPE_CHECKING:
    from kvpool.client.async_pool import AsyncPool


@dataclass(slots=True)
class PinnedBlocks:
    """Blocks [0, found) of a chain, held in place until released or `deadline`."""

    namespace: Namespace
    hashes: tuple[bytes, ...]
    held: list[tuple[NodeLink, ReadLease, int]]  # with the index of its first block
    miss_reason: str
    is_released: bool = field(default=False)
    wait_s: float = (
        0.0  # predicted for what had to come from disks, declined blocks too; -1: unknown
    )
    waited_s: float = 0.0  # for what did come

    @property
    def found(self) -> int:
        """How many leading blocks are held."""
        return sum(lease.found for _, lease, _ in self.held)

    @property
    def deadline(self) -> float:
        """When the first of the leases ends (monotonic seconds); reading renews them."""
        return min((lease.deadline for _, lease, _ in self.held), default=float("inf"))

    def add(self, link: NodeLink, lease: ReadLease, start: int) -> None:
        """Hold what `lease` covers, too: blocks from `start` on."""
        self.held.append((link, lease, start))
        is_known = min(self.wait_s, lease.wait_s) >= 0
        self.wait_s = self.wait_s + lease.wait_s if is_known else -1.0
        self.waited_s += lease.waited_s

    async def renew(self, ttl_s: float, timeout_s: float) -> None:
        """Hold them for `ttl_s` from now; nodes may grant less. For blocks that are held and not read yet.

        Raises:
            LeaseExpired: a lease was over, or the blocks were released.
            DeadlineExceeded, Unavailable: a node did not answer.
        """
        if self.is_released:
            raise LeaseExpired("these blocks were released already")
        deadline = time.monotonic() + timeout_s
        for link, lease, _ in self.held:
            if lease.lease_id:
                await link.renew(lease, ttl_s, time_left(deadline))

    def release(self) -> None:
        """Let them go; a second call does nothing."""
        if not self.is_released:
            self.is_released = True
            for link, lease, _ in self.held:
                link.release(lease)


async def pin(
    pool: AsyncPool,
    namespace: Namespace,
    hashes: Sequence[bytes],
    segments: Sequence[m.Segment],
    deadline: float,
    *,
    ttl_s: float,
    part: int | None,
    max_wait_s: float,
    tier: str,
    is_guess: bool,
) -> PinnedBlocks:
    """See `AsyncPool.pin`; `deadline` in monotonic seconds."""
    parts = () if part is None else (part,)
    pinned = PinnedBlocks(namespace, tuple(hashes), [], "")
    try:
        for segment in segments:
            run = hashes[segment.start : segment.start + segment.count]
            wanted = len(run)
            if not is_guess:
                wanted = pool.negative_cache.leading(
                    segment.node_id, namespace.namespace_id, run, time.monotonic()
                )
            if not wanted:
                pinned.miss_reason = "failed_recently"
                break
            limit_s = max(MIN_WAIT_S, max_wait_s - pinned.waited_s) if max_wait_s else 0.0
            asked = time.monotonic()
            try:
                link, lease = await pool.at_node(
                    segment.node_id,
                    deadline,
                    functools.partial(
                        _pin_at,
                        namespace=namespace,
                        hashes=run[:wanted],
                        ttl_s=ttl_s,
                        deadline=deadline,
                        parts=parts,
                        max_wait_s=limit_s,
                        tier=tier,
                    ),
                )
            except KvpoolError as error:
                waited_s = time.monotonic() - asked
                if is_guess:  # what was known of the node may be old
                    pool.forget_node(segment.node_id, error)
                else:
                    pool.note_failure(segment.node_id, namespace, run, error, waited_s)
                raise
            pool.negative_cache.answered(segment.node_id)
            pinned.add(link, lease, segment.start)
            if lease.found < segment.count:
                is_declined = lease.miss_reason in m.DECLINED
                if lease.found < wanted and not is_declined and not is_guess:
                    pool.note_misses(segment.node_id, namespace, [run[lease.found]])
                pinned.miss_reason = lease.miss_reason or "failed_recently"
                break
    except BaseException:
        pinned.release()
        raise
    return pinned


async def _pin_at(
    link: NodeLink, *, namespace: Namespace, deadline: float, **options: Any
) -> ReadLease:
    return await link.pin(namespace, timeout_s=time_left(deadline), **options)


async def read(pool: AsyncPool, pinned: PinnedBlocks, out: Any, deadline: float) -> int:
    """See `AsyncPool.read_pinned`; `deadline` in monotonic seconds."""
    if pinned.is_released:
        raise LeaseExpired("these blocks were released already")
    whole = plan_part(pinned.namespace.layout, 0)  # of whichever part is pinned
    addresses, owner, plan = placed(out, pinned.found, whole, writable=True)
    # Those of the nodes that are read later, too: each read renews its own alone.
    keepalives = [link.keep(lease, deadline) for link, lease, _ in pinned.held[1:]]
    try:
        await _read_each(pool, pinned, addresses, owner, plan, deadline)
    finally:
        for keepalive in keepalives:
            await keepalive.end()
    return pinned.found


async def _read_each(
    pool: AsyncPool,
    pinned: PinnedBlocks,
    addresses: Int64Array,
    owner: Any,
    plan: Plan,
    deadline: float,
) -> None:
    for link, lease, start in pinned.held:
        if not lease.found:
            continue
        if len(lease.places) != lease.found:
            raise InvalidArgument("read_pinned reads one part", hint="pin with part=")
        rows = slice(start, start + lease.found)
        hashes, asked = pinned.hashes[rows], time.monotonic()
        try:
            await link.read(
                pinned.namespace,
                lease,
                hashes,
                addresses[rows],
                owner,
                verify=pool.verify_checksums,
                timeout_s=time_left(deadline),
                plan=plan,
            )
        except BlockChecksumMismatch as error:
            pool.note_misses(link.node.node_id, pinned.namespace, [hashes[error.index]])
            raise
        except KvpoolError as error:
            waited_s = time.monotonic() - asked
            pool.note_failure(link.node.node_id, pinned.namespace, hashes, error, waited_s)
            raise
