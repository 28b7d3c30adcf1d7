"""Least recently used first, leaves of chains before what they build on: the default."""

from __future__ import annotations

from typing import ClassVar

from tiers.policies.base import K
from tiers.policies.lru import Lru


class PrefixLru(Lru[K]):
    """LRU that never lets a parent go before its child: a suffix without its prefix is dead weight.

    Inside a node it is the same as `Lru`, because there every policy respects chains (invariant 6).
    """

    is_leaves_only: ClassVar[bool] = True
