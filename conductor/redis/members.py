"""Members and namespaces of a pool as several conductors share them, in Redis or Valkey.

Every conductor tells what its own members said and hears what the others' did, in one exchange a tick, so
that a heartbeat costs no round trip. It does not judge who is alive (`conductor.members.membership`), since clocks of
two hosts cannot be compared: a record changes with each sign of life, and each reader sees by its own clock
how long it has not. Values are msgpack.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

import msgspec

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
Kind = Literal["node", "worker"]


class Record(msgspec.Struct, array_like=True, frozen=True):
    """One member, as its conductor knows it."""

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
    """What an exchange brought, beside what it changed in the memberships."""

    lost: list[tuple[Kind, str]] = field(
        default_factory=list
    )  # ours no longer: they must join again
    gone: list[tuple[Kind, str]] = field(default_factory=list)  # removed by another conductor
    moved: list[tuple[Kind, str]] = field(
        default_factory=list
    )  # ours until now, another's from now on
    namespaces: list[Namespace] = field(default_factory=list)
    has_lost_content: bool = False  # Redis is not the one that it was: all must report again


_encode = msgspec.msgpack.encode
_record = msgspec.msgpack.Decoder(Record)
_conductor = msgspec.msgpack.Decoder(ConductorRecord)
_namespace = msgspec.msgpack.Decoder(Namespace)
_layout = msgspec.msgpack.Decoder(Layout)
_NIL = _encode(None)


class _Group(Generic[D, R]):
    """One kind of members, and how to read their records."""

    def __init__(
        self, kind: Kind, membership: Membership[D, R], descriptor: type[D], report: type[R]
    ) -> None:
        self.kind = kind
        self.membership = membership
        self.present: set[str] = set()  # in Redis at the last exchange
        self._descriptors = msgspec.msgpack.Decoder(descriptor)
        self._reports = msgspec.msgpack.Decoder(report)
        self._encoded: dict[str, tuple[D, bytes]] = {}
        self._told: dict[str, tuple[int, float, bool]] = {}

    def news(self, conductor_id: str) -> list[Any]:
        """Our own members that gave a sign of life since the last exchange, as arguments of the script."""
        args: list[Any] = []
        own = {member.member_id: member for member in self.membership if not member.via}
        for member_id in self._told.keys() - own.keys():
            self._told.pop(member_id)
            self._encoded.pop(member_id, None)
        for member_id, member in own.items():
            state = (member.session, member.last_seen, member.is_draining)
            if member.session and self._told.get(member_id) != state:
                self._told[member_id] = state
                args += [self.kind, member_id, member.epoch, member.session]
                args.append(self._packed(member, conductor_id))
        return args

    def tell_all_again(self) -> None:
        """Redis may not have what it was told."""
        self._told.clear()

    def hear(
        self, flat: Sequence[bytes], conductor_id: str, now: float, out: ExchangeResult
    ) -> None:
        """Take in all records of this kind."""
        present = set()
        for i in range(0, len(flat), 2):
            member_id, record = flat[i].decode(), _record.decode(flat[i + 1])
            present.add(member_id)
            member = self.membership.get(member_id)
            is_ours = member is not None and not member.via
            if record.via == conductor_id and is_ours:
                continue
            if is_ours and member is not None and not 0 < member.session < record.session:
                continue  # it has joined here since, or is about to
            if is_ours and member is not None and member.epoch == record.epoch:
                out.moved.append((self.kind, member_id))
            self._mirror(member_id, record, now)
        for member_id in self.present - present:
            member = self.membership.get(member_id)
            if member is not None and member.via:
                self.membership.forget(member_id)
                out.gone.append((self.kind, member_id))
        self.present = present

    def _mirror(self, member_id: str, record: Record, now: float) -> None:
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
        record = Record(
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
    """The shared knowledge of one pool, as one conductor reads and writes it.

    Args:
        conductor_id, address: of this conductor.
        nodes, workers: memberships that exchanges keep up to date.
        ttl_s: how long keys outlive the last touch.
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
        self.conductors: list[
            str
        ] = []  # addresses of those that took part lately, this one included
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
        """Tell and hear, in one round trip.

        Args:
            conductor_silent_s: after so long without an exchange a conductor is forgotten.

        Raises:
            Unavailable: Redis did not answer; what was to be told is told the next time.
        """
        out = ExchangeResult()
        self._exchanges += 1
        me = _encode(ConductorRecord(self._exchanges, self.address))
        args: list[Any] = [self._ttl_s, uuid.uuid4().hex, self._last_namespace]
        args += [self._conductor_id, me]
        for group in self._groups:
            args += group.news(self._conductor_id)
        try:
            answer = await self._redis.run(lua.SYNC, self._keys(), args)
        except BaseException:
            self.tell_all_again()
            raise
        incarnation, lost, draining, nodes, workers, namespaces, conductors = answer
        if self._incarnation and incarnation != self._incarnation:
            out.has_lost_content = True
            self._last_namespace = b"0"
            for group in self._groups:
                group.present.clear()  # whose records are missing now has not left
        self._incarnation = incarnation
        for group, flat in zip(self._groups, (nodes, workers), strict=True):
            group.hear(flat, self._conductor_id, now, out)
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
        await self._note_conductors(conductors, now, conductor_silent_s)
        return out

    def tell_all_again(self) -> None:
        """Redis may have missed what it was told."""
        for group in self._groups:
            group.tell_all_again()

    async def join(self, kind: Kind, member_id: str, epoch: int) -> int:
        """Open a session for a member that reports here; returns its number.

        Raises:
            StaleEpoch: a later life of it is known.
            Unavailable: Redis did not answer.
        """
        keys = [self._fence(kind, member_id), b"%bnothing" % self._tag]
        session, known, _ = await self._redis.run(lua.JOIN, keys, (epoch, 1, self._ttl_s))
        if not session:
            raise StaleEpoch(f"{kind} {member_id} is at epoch {int(known)}, message is of {epoch}")
        return int(session)

    async def leave(self, kind: Kind, member_id: str, session: int) -> bool:
        """Remove a member, unless it has joined again since. Raises: `Unavailable`."""
        members = self._keys()[0 if kind == "node" else 1]
        keys = [members, self._fence(kind, member_id)]
        return bool(await self._redis.run(lua.LEAVE, keys, (member_id, session)))

    async def drain(self, node_id: str, epoch: int) -> None:
        """Have the conductor that the node reports to learn that it drains. Raises: `Unavailable`."""
        await self._redis.run(lua.DRAIN, [self._fence("node", node_id)], (epoch,))

    async def register(self, namespace: Namespace) -> None:
        """Make a namespace known to all conductors, or keep it known.

        Raises:
            LayoutMismatch: its owner is known with another layout.
            Unavailable: Redis did not answer.
        """
        owner = (namespace.model, namespace.revision, namespace.tenant, namespace.salt)
        # Names may be long and a salt secret: neither belongs into a key. Nor may anybody make a collision.
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
                hint="all engines of a namespace must agree; a changed one needs another revision",
            )

    async def namespace(self, namespace_id: bytes) -> Namespace | None:
        """A namespace that another conductor was told of. Raises: `Unavailable`."""
        value = await self._redis.command(
            "GET", b"%bns:%b" % (self._tag, namespace_id.hex().encode())
        )
        return _namespace.decode(value) if value is not None else None

    # ------------------------------------------------------------ inside

    async def _note_conductors(self, flat: Sequence[bytes], now: float, silent_s: float) -> None:
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
