"""The namespaces that a store knows: their layouts, slot sizes and accounts."""

from __future__ import annotations

from collections.abc import Iterator

from kvpool.blocks.layout import Namespace
from kvpool.blocks.tier import Tier
from kvpool.errors import InvalidArgument, LayoutMismatch, NoRoom, UnknownNamespace
from tiers.store.block_table import BlockTable
from tiers.store.blocks import Space
from tiers.store.config import StoreConfig
from tiers.store.fp8 import encoding_of, stored_bytes

TENANTS_SHARE = 3  # namespaces of one tenant for each that is left to all


class NamespaceTable:
    """Namespaces by their 16-byte id, in the order of registration.

    Args:
        table: the blocks.
        config: limits, and how parts are encoded on NVMe.
    """

    def __init__(self, table: BlockTable, config: StoreConfig) -> None:
        self._table = table
        self._config = config

    def __len__(self) -> int:
        return len(self._table.spaces)

    def __iter__(self) -> Iterator[Namespace]:
        return iter([space.namespace for space in self._table.spaces.values()])

    def __getitem__(self, namespace_id: bytes) -> Namespace:
        """The definition of a namespace.

        Raises:
            UnknownNamespace.
        """
        return self.space(namespace_id).namespace

    def find(self, namespace_id: bytes) -> Namespace | None:
        """The definition of a namespace; None if it is not known."""
        space = self._table.spaces.get(namespace_id)
        return space.namespace if space is not None else None

    def space(self, namespace_id: bytes, count: int = 0) -> Space:
        """The records of a namespace, for a call that names `count` blocks.

        Raises:
            UnknownNamespace. InvalidArgument: more than `max_blocks_per_call`.
        """
        space = self._table.spaces.get(namespace_id)
        if space is None:
            raise UnknownNamespace(
                f"namespace {bytes(namespace_id).hex()} is not registered here",
                hint="register it first; this node may have restarted",
            )
        if count > self._config.max_blocks_per_call:
            raise InvalidArgument(
                f"{count} blocks in one call", hint=f"at most {self._config.max_blocks_per_call}"
            )
        return space

    def register(self, namespace: Namespace) -> bytes:
        """Add a namespace, unless it is known; returns its id.

        Raises:
            LayoutMismatch: the same model, revision and tenant are known with another layout.
            BlockTooLarge: one part does not fit a slab.
            NoRoom: `max_namespaces` are known, or the tenant has three times as many as are still
                free, so that no tenant can use up the limit of all.
        """
        spaces = self._table.spaces
        namespace_id = namespace.namespace_id
        if namespace_id in spaces:
            return namespace_id
        of_tenant = 0
        for space in spaces.values():
            of_tenant += space.namespace.tenant == namespace.tenant
            if _owner(space.namespace) == _owner(namespace):
                differences = space.namespace.layout.differences(namespace.layout)
                if differences:
                    raise LayoutMismatch(
                        f"{namespace.name} is known here with another layout: "
                        f"{', '.join(differences)}",
                        hint="blocks of two layouts never mix; use equal settings on every engine,"
                        " or read with as_rank= if only tp_size differs",
                    )
        left = self._config.max_namespaces - len(spaces)
        if left <= 0:
            raise NoRoom(f"{len(spaces)} namespaces are known", hint="raise max_namespaces")
        if namespace.tenant and of_tenant >= TENANTS_SHARE * left:
            raise NoRoom(
                f"tenant {namespace.tenant} has {of_tenant} of {len(spaces)} namespaces",
                hint="use fewer salts and revisions, or raise max_namespaces",
            )
        layout = namespace.layout
        on_disk = encoding_of(layout, self._config.nvme_dtype)
        sizes = {Tier.NVME: stored_bytes(layout, on_disk)}
        tiers = self._table.tiers
        slot_bytes = tuple(
            tiers[tier].allocator.slot_size(sizes.get(tier, layout.part_bytes))
            if tier in tiers
            else 0
            for tier in Tier
        )
        account = self._table.accounts.number_of(namespace)
        spaces[namespace_id] = Space(namespace, slot_bytes, account, on_disk)
        return namespace_id

    def forget_idle(self, tenant: str) -> bool:
        """Forget the oldest namespace that has no blocks here, so that another can be registered.

        Prefers those of `tenant`. A client that still uses the namespace registers it again.
        Returns False if there is none to forget.
        """
        held = {block.space for block in self._table.detached}  # dropped, and still read
        idle = [
            (space.namespace.tenant != tenant, number, namespace_id)
            for number, (namespace_id, space) in enumerate(self._table.spaces.items())
            if space.is_idle and space not in held
        ]
        if not idle:
            return False
        is_others, _, namespace_id = min(idle)
        if is_others and len(self._table.spaces) < self._config.max_namespaces:
            return False  # the tenant itself has too many
        del self._table.spaces[namespace_id]
        self._table.counters["namespaces_forgotten"] += 1
        return True


def _owner(namespace: Namespace) -> tuple[str, str, str, str]:
    return namespace.model, namespace.revision, namespace.tenant, namespace.salt
