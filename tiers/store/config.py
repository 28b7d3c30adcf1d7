"""Limits and times of a node's store. `kvpool.config.settings` holds what users write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvpool.errors import ConfigError, InvalidArgument
from tiers.policies import DEFAULT, policy_class
from tiers.store.fp8 import Encoding
from tiers.store.quotas import check_quotas


@dataclass(slots=True, frozen=True)
class StoreConfig:
    """Limits and times of a store.

    Raises:
        ConfigError: a value is out of range, a low watermark is above its high one, a policy is
            unknown, or the quotas exceed a tier.
    """

    grace_s: float = 2.0  # blocks stay pinned this long past a lease's deadline (invariant 3)
    max_lease_s: float = 60.0
    max_reservation_s: float = 120.0
    quarantine_s: float = 30.0  # longest that a transfer may last (invariant 2)
    max_blocks_per_call: int = 65_536
    max_namespaces: int = 4096
    dram_high_watermark: float = 0.9  # share in use above which demotion begins
    dram_low_watermark: float = (
        0.7  # demotion ends when the share that is not reclaimable is below it
    )
    hbm_high_watermark: float = 0.9  # the same for HBM, whose blocks are demoted to DRAM
    hbm_low_watermark: float = 0.7
    write_through: bool = False  # write every block of DRAM to NVMe as well
    migration_retry_s: float = 5.0  # wait after a failed demotion
    ghost_hashes: int = 65_536  # hashes of blocks that left, kept with the reason
    max_pending_events: int = 1_000_000  # kept for a slow or absent reader
    eviction: str = DEFAULT  # policy of DRAM and HBM, by name (`tiers.policies`)
    nvme_eviction: str = DEFAULT
    retention_share: float = 0.5  # of each tier that may be promised to retained blocks
    # By tenant or namespace id (hex): a share (float) of each tier, or bytes (int) of DRAM
    # (`tiers.store.quotas`).
    quotas: Mapping[str, float | int] = field(default_factory=dict)
    nvme_dtype: Encoding = "as_is"  # how parts are written to NVMe (`tiers.store.fp8`)
    first_id: int = (
        1  # of leases and reservations; derived from the epoch, so that old numbers are void
    )

    def __post_init__(self) -> None:
        for name in ("grace_s", "quarantine_s", "migration_retry_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name}={getattr(self, name)} must not be negative")
        for name in ("max_lease_s", "max_reservation_s", "max_blocks_per_call", "max_namespaces"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be positive")
        for tier in ("dram", "hbm"):
            low, high = (getattr(self, f"{tier}_{end}_watermark") for end in ("low", "high"))
            if not 0 <= low <= high <= 1:
                raise ConfigError(
                    f"{tier} watermarks {low} and {high}", hint="0 <= low <= high <= 1"
                )
        policy_class(self.eviction)
        policy_class(self.nvme_eviction)
        if not 0 <= self.retention_share <= 1:
            raise ConfigError(f"retention_share={self.retention_share} must lie in [0, 1]")
        check_quotas(self.quotas)
        if min(self.first_id, self.ghost_hashes, self.max_pending_events) < 1:
            raise ConfigError("first_id, ghost_hashes and max_pending_events must be at least 1")

    def lease_ttl(self, ttl_s: float) -> float:
        """Seconds that a lease of `ttl_s` gets.

        Raises:
            InvalidArgument: not positive.
        """
        return _ttl(ttl_s, self.max_lease_s)

    def reservation_ttl(self, ttl_s: float) -> float:
        """Seconds that a reservation of `ttl_s` gets.

        Raises:
            InvalidArgument: not positive.
        """
        return _ttl(ttl_s, self.max_reservation_s)


def _ttl(ttl_s: float, limit_s: float) -> float:
    if not ttl_s > 0:  # NaN included
        raise InvalidArgument(f"ttl_s={ttl_s} must be positive")
    return min(ttl_s, limit_s)
