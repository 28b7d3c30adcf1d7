"""Pins a chain on the nodes that have it, and reads pinned blocks.

The directory's negative cache keeps recently failed nodes from being asked again.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvpool.blocks.layout import Namespace
from kvpool.blocks.resharding import TransferPlan, plan_part
from kvpool.blocks.tier import Tier
from kvpool.client.data.buffers import block_addresses
from kvpool.client.data.reading import MIN_WAIT_S
from kvpool.client.node.deadlines import time_left
from kvpool.client.node.directory import NodeDirectory
from kvpool.client.node.grants import ReadLease
from kvpool.client.node.node_link import BlockChecksumMismatch, NodeLink
from kvpool.errors import InvalidArgument, KvpoolError, LeaseExpired
from kvpool.transports.copy import Int64Array
from kvpool.wire import messages as m


@dataclass(slots=True)
class PinnedBlocks:
    """Blocks [0, found) of a chain, leased until `release` or `deadline`."""

    namespace: Namespace
    hashes: tuple[bytes, ...]
    held: list[tuple[NodeLink, ReadLease, int]]  # the index of the lease's first block
    miss_reason: str
    is_released: bool = field(default=False)
    wait_s: float = 0.0  # predicted for blocks on disks, including declined ones; -1: unknown
    waited_s: float = 0.0  # for the blocks that came from disks

    @property
    def found(self) -> int:
        """How many leading blocks are leased."""
        return sum(lease.found for _, lease, _ in self.held)

    @property
    def deadline(self) -> float:
        """When the first lease ends (monotonic seconds). Reading renews the leases."""
        return min((lease.deadline for _, lease, _ in self.held), default=float("inf"))

    def add(self, link: NodeLink, lease: ReadLease, start: int) -> None:
        """Add a lease of the blocks from index `start`."""
        self.held.append((link, lease, start))
        is_known = min(self.wait_s, lease.wait_s) >= 0
        self.wait_s = self.wait_s + lease.wait_s if is_known else -1.0
        self.waited_s += lease.waited_s

    async def renew(self, ttl_s: float, timeout_s: float) -> None:
        """Extend the leases to `ttl_s` from now; nodes may grant less.

        Use it for blocks not yet read.

        Raises:
            LeaseExpired: a lease had ended, or the blocks were released.
            DeadlineExceeded, Unavailable: a node did not answer.
        """
        if self.is_released:
            raise LeaseExpired("these blocks were already released")
        deadline = time.monotonic() + timeout_s
        for link, lease, _ in self.held:
            if lease.lease_id:
                await link.renew(lease, ttl_s, time_left(deadline))

    def release(self) -> None:
        """End the leases. A second call does nothing."""
        if not self.is_released:
            self.is_released = True
            for link, lease, _ in self.held:
                link.release(lease)


async def pin(
    directory: NodeDirectory,
    namespace: Namespace,
    hashes: Sequence[bytes],
    segments: Sequence[m.Segment],
    deadline: float,
    *,
    ttl_s: float,
    part: int | None,
    max_wait_s: float,
    tier: Tier,
    is_guess: bool,
) -> PinnedBlocks:
    """Pin the blocks of `segments` in order. Arguments and errors are those of `AsyncPool.pin`."""
    parts = () if part is None else (part,)
    pinned = PinnedBlocks(namespace, tuple(hashes), [], "")
    try:
        for segment in segments:
            run = hashes[segment.start : segment.start + segment.count]
            wanted = len(run)
            if not is_guess:
                wanted = directory.count_unfailed(segment.node_id, namespace, run)
            if not wanted:
                pinned.miss_reason = "failed_recently"
                break
            limit_s = max(MIN_WAIT_S, max_wait_s - pinned.waited_s) if max_wait_s else 0.0
            asked = time.monotonic()
            try:
                link, lease = await directory.call_node(
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
                if is_guess:  # the guess may be out of date
                    directory.forget_node(segment.node_id, error)
                else:
                    directory.report_failure(segment.node_id, namespace, run, error, waited_s)
                raise
            directory.negative_cache.reset_silence(segment.node_id)
            pinned.add(link, lease, segment.start)
            if lease.found < segment.count:
                is_declined = lease.miss_reason in m.DECLINED
                if lease.found < wanted and not is_declined and not is_guess:
                    directory.report_misses(segment.node_id, namespace, [run[lease.found]])
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


async def read(
    directory: NodeDirectory, pinned: PinnedBlocks, out: Any, deadline: float, *, verify: bool
) -> int:
    """Read pinned blocks of one part. Arguments and errors are those of `AsyncPool.read_pinned`."""
    if pinned.is_released:
        raise LeaseExpired("these blocks were already released")
    whole = plan_part(pinned.namespace.layout, 0)  # works for whichever part is pinned
    addresses, owner, plan = block_addresses(out, pinned.found, whole, writable=True)
    # Keep the leases of nodes that are read later, too: each read renews only its own.
    keepalives = [link.keep_alive(lease, deadline) for link, lease, _ in pinned.held[1:]]
    try:
        await _read_each(directory, pinned, addresses, owner, plan, deadline, verify)
    finally:
        for keepalive in keepalives:
            await keepalive.end()
    return pinned.found


async def _read_each(
    directory: NodeDirectory,
    pinned: PinnedBlocks,
    addresses: Int64Array,
    owner: Any,
    plan: TransferPlan,
    deadline: float,
    verify: bool,
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
                verify=verify,
                timeout_s=time_left(deadline),
                plan=plan,
            )
        except BlockChecksumMismatch as error:
            directory.report_misses(link.node.node_id, pinned.namespace, [hashes[error.index]])
            raise
        except KvpoolError as error:
            waited_s = time.monotonic() - asked
            directory.report_failure(link.node.node_id, pinned.namespace, hashes, error, waited_s)
            raise
