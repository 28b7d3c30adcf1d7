"""The namespaces that a conductor knows.

All namespaces of an owner have one layout. Bounded; pure.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import islice

from kvpool.blocks.layout import Namespace
from kvpool.errors import InvalidArgument, LayoutMismatch

MAX_NAMESPACES = 100_000
MAX_PAGE = 10_000

Owner = tuple[str, str, str, str]  # model, revision, tenant, salt


class KnownNamespaces:
    """Namespaces by id. Above the capacity the oldest one is dropped.

    Raises:
        InvalidArgument: the capacity is not positive.
    """

    def __init__(self, capacity: int = MAX_NAMESPACES) -> None:
        if capacity < 1:
            raise InvalidArgument(f"a capacity of {capacity} namespaces", hint="use at least 1")
        self._capacity = capacity
        self._by_id: OrderedDict[bytes, Namespace] = OrderedDict()
        # An owner may have one namespace per hash algorithm, all with the same layout.
        self._by_owner: dict[Owner, dict[bytes, Namespace]] = {}
        self._owners: dict[tuple[str, str, str], dict[Owner, None]] = {}  # by model, tenant, salt

    def add(self, namespace: Namespace) -> bytes:
        """Add a namespace and return its id. The cost does not depend on the number of namespaces.

        Raises:
            LayoutMismatch: a namespace of this owner is known with another layout.
        """
        namespace_id = namespace.namespace_id
        if namespace_id in self._by_id:
            return namespace_id
        known = next(iter(self._by_owner.get(_owner(namespace), {}).values()), None)
        if known is not None and known.layout != namespace.layout:
            raise LayoutMismatch(
                f"{namespace.name} is known under another layout: "
                + "; ".join(known.layout.differences(namespace.layout)),
                hint="all engines of a namespace need the same layout: give a changed engine"
                " another revision; if only tp_size differs, compatible_namespaces lists what it"
                " can read",
            )
        if len(self._by_id) >= self._capacity:
            self._forget_oldest()  # its clients register it again when they are refused
        self._by_id[namespace_id] = namespace
        self._by_owner.setdefault(_owner(namespace), {})[namespace_id] = namespace
        self._owners.setdefault(_kin(namespace), {})[_owner(namespace)] = None
        return namespace_id

    def page(self, offset: int, limit: int, tenant: str | None = None) -> list[Namespace]:
        """Up to `limit` namespaces after the first `offset`, oldest first, of one tenant or of all.

        Raises:
            InvalidArgument: offset is negative, or limit is not in 1 to `MAX_PAGE`.
        """
        if offset < 0 or not 1 <= limit <= MAX_PAGE:
            raise InvalidArgument(
                f"offset {offset}, limit {limit}",
                hint=f"use an offset of at least 0 and a limit of 1 to {MAX_PAGE}",
            )
        known: Iterable[Namespace] = self._by_id.values()
        if tenant is not None:
            known = (namespace for namespace in known if namespace.tenant == tenant)
        first = min(offset, len(self._by_id))  # islice refuses numbers above sys.maxsize
        return list(islice(known, first, first + limit))

    def get(self, namespace_id: bytes) -> Namespace | None:
        """A namespace by its id; None if it is unknown."""
        return self._by_id.get(namespace_id)

    def kin(self, namespace: Namespace, limit: int) -> list[Namespace]:
        """Other namespaces of the same model, tenant and salt, newest first."""
        found = []
        for owner in reversed(self._owners.get(_kin(namespace), {})):
            found += [other for other in self._by_owner[owner].values() if other != namespace]
            if len(found) >= limit:
                break
        return found[:limit]

    def of(self, model: str, tenant: str, salt: str) -> list[Namespace]:
        """The namespaces of one model, tenant and salt, newest first."""
        owners = reversed(self._owners.get((model, tenant, salt), {}))
        return [namespace for owner in owners for namespace in self._by_owner[owner].values()]

    def __getitem__(self, namespace_id: bytes) -> Namespace:
        return self._by_id[namespace_id]

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._by_id)

    def __contains__(self, namespace_id: object) -> bool:
        return namespace_id in self._by_id

    def __len__(self) -> int:
        return len(self._by_id)

    def _forget_oldest(self) -> None:
        namespace_id, namespace = self._by_id.popitem(last=False)
        owned = self._by_owner[_owner(namespace)]
        del owned[namespace_id]
        if not owned:
            del self._by_owner[_owner(namespace)]
            owners = self._owners[_kin(namespace)]
            del owners[_owner(namespace)]
            if not owners:
                del self._owners[_kin(namespace)]


def _owner(namespace: Namespace) -> Owner:
    return (namespace.model, namespace.revision, namespace.tenant, namespace.salt)


def _kin(namespace: Namespace) -> tuple[str, str, str]:
    return (namespace.model, namespace.tenant, namespace.salt)
