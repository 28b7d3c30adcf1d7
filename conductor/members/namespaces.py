"""The namespaces that a conductor knows, each owner's in one layout. Bounded; no I/O, no clock."""

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
    """Namespaces by id; the oldest is forgotten when there are too many.

    Raises:
        InvalidArgument: the capacity is not positive.
    """

    def __init__(self, capacity: int = MAX_NAMESPACES) -> None:
        if capacity < 1:
            raise InvalidArgument(f"a capacity of {capacity} namespaces")
        self._capacity = capacity
        self._by_id: OrderedDict[bytes, Namespace] = OrderedDict()
        # An owner may have one per hash algorithm; all of them have the same layout.
        self._by_owner: dict[Owner, dict[bytes, Namespace]] = {}
        self._owners: dict[tuple[str, str, str], dict[Owner, None]] = {}  # by model, tenant, salt

    def add(self, namespace: Namespace) -> bytes:
        """Make a namespace known; returns its id. Costs the same however many there are.

        Raises:
            LayoutMismatch: its owner is known with another layout.
        """
        namespace_id = namespace.namespace_id
        if namespace_id in self._by_id:
            return namespace_id
        known = next(iter(self._by_owner.get(_owner(namespace), {}).values()), None)
        if known is not None and known.layout != namespace.layout:
            raise LayoutMismatch(
                f"{namespace.name} is known under another layout: "
                + "; ".join(known.layout.differences(namespace.layout)),
                hint="all engines of a namespace must agree: give a changed one another revision; one that"
                " differs in tp_size alone finds what it can read with compatible_namespaces",
            )
        if len(self._by_id) >= self._capacity:
            self._forget_oldest()  # clients that are refused for it name theirs again
        self._by_id[namespace_id] = namespace
        self._by_owner.setdefault(_owner(namespace), {})[namespace_id] = namespace
        self._owners.setdefault(_kin(namespace), {})[_owner(namespace)] = None
        return namespace_id

    def page(self, offset: int, limit: int, tenant: str | None = None) -> list[Namespace]:
        """Up to `limit` namespaces from the `offset`-th on, oldest first; those of one tenant, or all.

        Raises:
            InvalidArgument: offset is negative, or limit is not in 1 to `MAX_PAGE`.
        """
        if offset < 0 or not 1 <= limit <= MAX_PAGE:
            raise InvalidArgument(
                f"offset {offset}, limit {limit}", hint=f"at most {MAX_PAGE} at a time"
            )
        known: Iterable[Namespace] = self._by_id.values()
        if tenant is not None:
            known = (namespace for namespace in known if namespace.tenant == tenant)
        first = min(offset, len(self._by_id))  # islice takes no number past the machine's
        return list(islice(known, first, first + limit))

    def get(self, namespace_id: bytes) -> Namespace | None:
        """A namespace by its id, if it is known."""
        return self._by_id.get(namespace_id)

    def kin(self, namespace: Namespace, limit: int) -> list[Namespace]:
        """Others of the same model, tenant and salt, the latest first: another revision, layout or hash."""
        found = []
        for owner in reversed(self._owners.get(_kin(namespace), {})):
            found += [other for other in self._by_owner[owner].values() if other != namespace]
            if len(found) >= limit:
                break
        return found[:limit]

    def of(self, model: str, tenant: str, salt: str) -> list[Namespace]:
        """Those of one model, tenant and salt, the latest first."""
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
