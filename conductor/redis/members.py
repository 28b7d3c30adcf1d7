"""The members and namespaces of a pool that several conductors share, in Redis or Valkey.

In one exchange per tick, every conductor writes the reports of its own members and reads those of
all others, so that a heartbeat costs no round trip. `conductor.members.membership` decides who is
alive. Clocks of two hosts cannot be compared, so a record changes with each sign of life, and each
reader measures by its own clock how long a record has not changed. Values are msgpack.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec

from conductor.cluster.pool_state import Kind
from conductor.members.membership import Member, Membership
from conductor.members.namespaces import MAX_NAMESPACES
from conductor.redis import scripts as lua
from conductor.redis.client import RedisClient
from conductor.redis.index import TTL_S
from kvpool.blocks.layout import Layout, Namespace
from kvpool.errors import LayoutMismatch, StaleEpoch
from kvpool.wire import messages as m

D = TypeVar("D")
R = TypeVar("R")


class MemberRecord(msgspec.Struct, array_like=True, frozen=True):
    """One member, as its conductor reports it."""

    epoch: int
    session: int
    beat: int  # changes with each sign of life
    via: str  # id of the conductor
    is_draining: bool
    descriptor: msgspec.Raw
    report: msgspec.Raw


class ConductorRecord(msgspec.Struct, array_like=True, frozen=True):
    """One conductor; `beat` changes with each exchange."""

    beat: int
    address: str


@dataclass(slots=True)
class ExchangeResult:
    """The result of an exchange, beside its changes to the memberships.

    `lost` are members of ours whose session is over: they must join again. `gone` were removed by
    another conductor. `moved` were ours and now report to another conductor. `has_lost_content`:
    Redis lost its data, so all members must report again.
    """

    lost: list[tuple[Kind, str]] = field(default_factory=list)
    gone: list[tuple[Kind, str]] = field(default_factory=list)
    moved: list[tuple[Kind, str]] = field(default_factory=list)
    namespaces: list[Namespace] = field(default_factory=list)
    has_lost_content: bool = False


_encode = msgspec.msgpack.encode
_record = msgspec.msgpack.Decoder(MemberRecord)
_conductor = msgspec.msgpack.Decoder(ConductorRecord)
_namespace = msgspec.msgpack.Decoder(Namespace)
_layout = msgspec.msgpack.Decoder(Layout)
_NIL = _encode(None)


class _Group(Generic[D, R]):
    """One kind of members, with the decoders of their records."""

    def __init__(
        self, kind: Kind, membership: Membership[D, R], descriptor: type[D], report: type[R]
    ) -> None:
        self.kind = kind
        self.membership = membership
        self.present: set[str] = set()  # in Redis at the last exchange
        self._descriptors = msgspec.msgpack.Decoder(descriptor)
        self._reports = msgspec.msgpack.Decoder(report)
        self._encoded: dict[str, tuple[D, bytes]] = {}
        self._sent: dict[str, tuple[int, float, bool]] = {}

    def changes(self, conductor_id: str) -> list[Any]:
        """Our own members with a sign of life since the last exchange, as script arguments."""
        args: list[Any] = []
        own = {member.member_id: member for member in self.membership if not member.via}
        for member_id in self._sent.keys() - own.keys():
            self._sent.pop(member_id)
            self._encoded.pop(member_id, None)
        for member_id, member in own.items():
            state = (member.session, member.last_seen, member.is_draining)
            if member.session and self._sent.get(member_id) != state:
                self._sent[member_id] = state
                args += [self.kind, member_id, member.epoch, member.session]
                args.append(self._packed(member, conductor_id))
        return args

    def send_all_again(self) -> None:
        """Send every member in the next exchange: Redis may have missed some."""
        self._sent.clear()

    def receive(
        self, flat: Sequence[bytes], conductor_id: str, now: float, out: ExchangeResult
    ) -> None:
        """Apply all records of this kind."""
        present = set()
        for i in range(0, len(flat), 2):
            member_id, record = flat[i].decode(), _record.decode(flat[i + 1])
            present.add(member_id)
            member = self.membership.get(member_id)
            is_ours = member is not None and not member.via
            if record.via == conductor_id:
                continue  # ours, or it left and Redis does not know yet
            if is_ours and member is not None and not 0 < member.session < record.session:
                continue  # it joined here later, or is about to
            if is_ours and member is not None and member.epoch == record.epoch:
                out.moved.append((self.kind, member_id))
            self._mirror(member_id, record, now)
        for member_id in self.present - present:
            member = self.membership.get(member_id)
            if member is not None and member.via:
                self.membership.forget(member_id)
                out.gone.append((self.kind, member_id))
        self.present = present

    def _mirror(self, member_id: str, record: MemberRecord, now: float) -> None:
        member = self.membership.get(member_id)
        if member is not None and (member.via, member.session, member.beat, member.epoch) == (
            record.via,
            record.session,
            record.beat,
            record.epoch,
        ):
            return
        self.membership.mirror(
            member_id,
            record.epoch,
            self._descriptors.decode(record.descriptor),
            None if bytes(record.report) == _NIL else self._reports.decode(record.report),
            now,
            via=record.via,
            session=record.session,
            beat=record.beat,
            is_draining=record.is_draining,
        )

    def _packed(self, member: Member[D, R], conductor_id: str) -> bytes:
        known = self._encoded.get(member.member_id)
        if known is None or known[0] is not member.descriptor:
            known = self._encoded[member.member_id] = (
                member.descriptor,
                _encode(member.descriptor),
            )
        record = MemberRecord(
            member.epoch,
            member.session,
            int(member.last_seen * 1e6),
            conductor_id,
            member.is_draining,
            msgspec.Raw(known[1]),
            msgspec.Raw(_encode(member.report)),
        )
        return _encode(record)


class SharedMembers:
    """One conductor's access to the shared members of a pool.

    Args:
        conductor_id, address: of this conductor.
        nodes, workers: memberships that exchanges update.
        ttl_s: time after which keys expire that nobody touches.
    """

    def __init__(
        self,
        redis: RedisClient,
        pool: str,
        conductor_id: str,
        address: str,
        nodes: Membership[m.NodeDescriptor, m.NodeStatsReply],
        workers: Membership[m.WorkerDescriptor, m.WorkerLoad],
        *,
        ttl_s: int = TTL_S,
    ) -> None:
        self.conductors: list[str] = []  # addresses of the live conductors, including this one
        self._redis = redis
        self._tag = b"kvpool:{%b}:" % pool.encode()
        self._conductor_id = conductor_id
        self.address = address
        self._ttl_s = ttl_s
        self._groups: tuple[_Group[Any, Any], _Group[Any, Any]] = (
            _Group("node", nodes, m.NodeDescriptor, m.NodeStatsReply),
            _Group("worker", workers, m.WorkerDescriptor, m.WorkerLoad),
        )
        self._incarnation = b""
        self._last_namespace = b"0"
        self._exchanges = 0
        self._beats: dict[bytes, tuple[int, float]] = {}

    async def exchange(self, now: float, conductor_silent_s: float) -> ExchangeResult:
        """Send and receive changes, in one round trip.

        Args:
            conductor_silent_s: time without an exchange after which a conductor is dropped.

        Raises:
            Unavailable: Redis did not reply. The changes are sent again the next time.
        """
        out = ExchangeResult()
        self._exchanges += 1
        me = _encode(ConductorRecord(self._exchanges, self.address))
        args: list[Any] = [self._ttl_s, uuid.uuid4().hex, self._last_namespace]
        args += [self._conductor_id, me]
        for group in self._groups:
            args += group.changes(self._conductor_id)
        try:
            reply = await self._redis.run(lua.SYNC, self._keys(), args)
        except BaseException:
            self.send_all_again()
            raise
        incarnation, lost, draining, nodes, workers, namespaces, conductors = reply
        if self._incarnation and incarnation != self._incarnation:
            out.has_lost_content = True
            self._last_namespace = b"0"
            for group in self._groups:
                group.present.clear()  # members without a record now have not left
        self._incarnation = incarnation
        for group, flat in zip(self._groups, (nodes, workers), strict=True):
            group.receive(flat, self._conductor_id, now, out)
        for name in lost:
            group, member_id = self._named(name)
            member = group.membership.get(member_id)
            if member is not None and not member.via:
                out.lost.append((group.kind, member_id))
        for name in draining:
            group, member_id = self._named(name)
            member = group.membership.get(member_id)
            if member is not None and not member.is_draining:
                group.membership.drain(member_id)
        for i in range(0, len(namespaces), 2):
            self._last_namespace = namespaces[i]
            out.namespaces.append(_namespace.decode(namespaces[i + 1]))
        await self._update_conductors(conductors, now, conductor_silent_s)
        return out

    def send_all_again(self) -> None:
        """Send every member in the next exchange: Redis may have missed some."""
        for group in self._groups:
            group.send_all_again()

    async def join(self, kind: Kind, member_id: str, epoch: int) -> int:
        """Open a session for a member that reports here, and return its number.

        Raises:
            StaleEpoch: a newer epoch of the member is known.
            Unavailable: Redis did not reply.
        """
        keys = [self._fence(kind, member_id), b"%bnothing" % self._tag]
        session, known, _ = await self._redis.run(lua.JOIN, keys, (epoch, 1, self._ttl_s))
        if not session:
            raise StaleEpoch(f"{kind} {member_id} is at epoch {int(known)}, message is of {epoch}")
        return int(session)

    async def leave(self, kind: Kind, member_id: str, session: int) -> bool:
        """Remove a member, unless it has joined again since. Raises `Unavailable`."""
        members = self._keys()[0 if kind == "node" else 1]
        keys = [members, self._fence(kind, member_id)]
        return bool(await self._redis.run(lua.LEAVE, keys, (member_id, session)))

    async def drain(self, node_id: str, epoch: int) -> None:
        """Mark a node as draining, for the conductor that it reports to. Raises `Unavailable`."""
        await self._redis.run(lua.DRAIN, [self._fence("node", node_id)], (epoch,))

    async def register(self, namespace: Namespace) -> None:
        """Make a namespace known to all conductors, or keep it from expiring.

        Raises:
            LayoutMismatch: its model, revision, tenant and salt are known with another layout.
            Unavailable: Redis did not reply.
        """
        owner = (namespace.model, namespace.revision, namespace.tenant, namespace.salt)
        # Names may be long and salts are secret, so the key is a digest, and one without known
        # collisions.
        digest = hashlib.sha256(_encode(owner)).hexdigest()[:32].encode()
        hexed = namespace.namespace_id.hex().encode()
        tag = self._tag
        keys = [b"%bns:%b" % (tag, hexed), b"%bowner:%b" % (tag, digest)]
        keys += [tag + b"namespaces", tag + b"namespace-number"]
        layout = _encode(namespace.layout)
        args = (hexed, _encode(namespace), layout, self._ttl_s, MAX_NAMESPACES)
        known = await self._redis.run(lua.REGISTER, keys, args)
        if known != layout:
            other = _layout.decode(known)
            raise LayoutMismatch(
                f"{namespace.name} is known under another layout: "
                + "; ".join(other.differences(namespace.layout)),
                hint="all engines of a namespace need the same layout: give a changed engine"
                " another revision",
            )

    async def namespace(self, namespace_id: bytes) -> Namespace | None:
        """A namespace that another conductor registered; None if there is none.

        Raises `Unavailable`.
        """
        value = await self._redis.command(
            "GET", b"%bns:%b" % (self._tag, namespace_id.hex().encode())
        )
        return _namespace.decode(value) if value is not None else None

    # ------------------------------------------------------------ inside

    async def _update_conductors(self, flat: Sequence[bytes], now: float, silent_s: float) -> None:
        addresses, silent = [], []
        for i in range(0, len(flat), 2):
            record = _conductor.decode(flat[i + 1])
            beat, since = self._beats.get(flat[i], (0, now))
            if beat != record.beat:
                since = now
            self._beats[flat[i]] = (record.beat, since)
            if now - since < silent_s:
                addresses.append(record.address)
            else:
                silent.append(flat[i])
        self.conductors = sorted(addresses)
        if silent:
            await self._redis.command("HDEL", self._keys()[6], *silent)
            for conductor in silent:
                del self._beats[conductor]

    def _named(self, name: bytes) -> tuple[_Group[Any, Any], str]:
        kind, _, member_id = name.decode().partition(":")
        return self._groups[0 if kind == "node" else 1], member_id

    def _fence(self, kind: Kind, member_id: str) -> bytes:
        return b"%b%b:%b" % (self._tag, kind.encode(), member_id.encode())

    def _keys(self) -> list[bytes]:
        names = (b"nodes", b"workers", b"", b"incarnation", b"namespaces", b"ns:", b"conductors")
        return [self._tag + name for name in names]
