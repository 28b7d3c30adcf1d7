"""Quotas: what each account uses of a tier, who is over the quota, and from whom room may be taken.

A quota is a guarantee, not a bound: any account may use all room that is free. If there is none, an
account below its quota takes from accounts above theirs, the highest ratio first. An account above
its quota evicts its own blocks, or takes from those with a higher ratio. No account above its quota
takes from one below.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from math import inf
from typing import NamedTuple

from kvpool.blocks.layout import Namespace
from kvpool.blocks.tier import Tier
from kvpool.errors import ConfigError

Quotas = Mapping[str, float | int]
OTHERS = ""  # the account of all who have no quota of their own


class AccountUsage(NamedTuple):
    """What one account uses of one tier, in bytes of slots; `quota_bytes` is its guarantee."""

    account: str  # tenant or namespace id (hex); "" for all others together
    tier: Tier
    quota_bytes: int
    used_bytes: int


def check_quotas(quotas: Quotas) -> None:
    """Refuse quotas that are malformed or exceed a tier.

    Raises:
        ConfigError: a key is empty, a share is not in (0, 1], a size is not positive, or the shares
            exceed 1.
    """
    for owner, quota in quotas.items():
        if not isinstance(owner, str) or not owner:
            raise ConfigError(f"a quota belongs to a tenant or a namespace id, not to {owner!r}")
        is_number = isinstance(quota, (int, float)) and not isinstance(quota, bool)
        if not is_number or not quota > 0 or (isinstance(quota, float) and quota > 1):
            raise ConfigError(
                f"quota of {owner!r} is {quota!r}", hint="a share in (0, 1.0] or a number of bytes"
            )
    shares = sum(quota for quota in quotas.values() if isinstance(quota, float))
    if shares > 1 + 1e-9:
        raise ConfigError(f"quotas add up to {shares:g} of a tier", hint="at most 1")


class Accounts:
    """The accounts of a store; number 0 is shared by all who have no quota.

    Args:
        quotas: by tenant or namespace id (32 hex digits): a share (float) of each tier, or bytes
            (int) of DRAM, which count as the same share of every other tier.
        dram_bytes: capacity of DRAM.

    Raises:
        ConfigError: together they exceed DRAM.
    """

    def __init__(self, quotas: Quotas, dram_bytes: int) -> None:
        check_quotas(quotas)
        shares = _shares(quotas, dram_bytes)
        if sum(shares) > 1 + 1e-9:
            raise ConfigError(
                f"quotas add up to {sum(shares) * dram_bytes:.0f} of {dram_bytes} bytes",
                hint="lower them or raise dram_bytes",
            )
        self.names = [OTHERS, *quotas]
        self.shares = [max(0.0, 1 - sum(shares)), *shares]
        self._quotas = quotas
        self._numbers = {name: number for number, name in enumerate(self.names) if name}

    def resize(self, dram_bytes: int) -> None:
        """DRAM has another capacity now; quotas that exceed it together are cut in proportion."""
        shares = _shares(self._quotas, dram_bytes)
        excess = max(1.0, sum(shares))
        shares = [share / excess for share in shares]
        self.shares = [max(0.0, 1 - sum(shares)), *shares]

    def number_of(self, namespace: Namespace) -> int:
        """The account of a namespace: its own, else its tenant's, else that of all others."""
        numbers = self._numbers
        own = numbers.get(namespace.namespace_id.hex())
        return own if own is not None else numbers.get(namespace.tenant, 0)


def _shares(quotas: Quotas, dram_bytes: int) -> list[float]:
    return [q if isinstance(q, float) else q / dram_bytes for q in quotas.values()]


class QuotaTable:
    """What each account uses of one tier, in bytes; O(log accounts) for each change.

    Args:
        accounts: the share of each account.
        capacity_bytes: of the tier.
    """

    def __init__(self, accounts: Accounts, capacity_bytes: int) -> None:
        self._accounts = accounts
        self.quotas = [int(share * capacity_bytes) for share in accounts.shares]
        self.used = [0] * len(self.quotas)
        self.is_shared = len(self.quotas) == 1  # there are no quotas
        # (used share of the quota, account) of all accounts that use any
        self._order: list[tuple[float, int]] = []

    def resize(self, capacity_bytes: int) -> None:
        """The capacity of the tier or the shares of the accounts have changed."""
        self.quotas = [int(share * capacity_bytes) for share in self._accounts.shares]
        if not self.is_shared:
            users = (account for account, used in enumerate(self.used) if used)
            self._order = sorted(
                (self._ratio(account, self.used[account]), account) for account in users
            )

    def charge(self, account: int, change_bytes: int) -> None:
        """The account uses `change_bytes` more; fewer if negative."""
        before = self.used[account]
        self.used[account] = before + change_bytes
        if self.is_shared:
            return
        if before:
            del self._order[bisect_left(self._order, (self._ratio(account, before), account))]
        if before + change_bytes:
            insort(self._order, (self._ratio(account, before + change_bytes), account))

    def is_over(self, account: int, but_bytes: int = 0) -> bool:
        """The account uses more than its quota, even without `but_bytes` of it."""
        return self.used[account] - but_bytes > self.quotas[account]

    def is_entitled(self, account: int, more_bytes: int) -> bool:
        """The account stays within its quota with `more_bytes`."""
        return self.used[account] + more_bytes <= self.quotas[account]

    def donors(self, account: int, more_bytes: int) -> Iterator[int]:
        """The accounts from which this one may take room for `more_bytes`, in order, with itself.

        The last ones are below their quotas too, but use more of them; only an account that stays
        within its quota takes from those.
        """
        if self.is_shared:
            yield account
            return
        is_entitled = self.is_entitled(account, more_bytes)
        own = self._ratio(account, self.used[account] + more_bytes)
        below: list[int] = []
        for ratio, other in reversed(self._order):
            if other == account:
                continue
            if ratio <= own and not (is_entitled and ratio > 1):
                break
            if ratio > 1:
                yield other
            elif is_entitled:
                below.append(other)
        yield account
        yield from below

    def _ratio(self, account: int, used_bytes: int) -> float:
        quota = self.quotas[account]
        return used_bytes / quota if quota else (inf if used_bytes else 0.0)
