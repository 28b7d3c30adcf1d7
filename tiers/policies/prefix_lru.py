"""Least recently used first, children before their parents: the default."""

from __future__ import annotations

from typing import ClassVar

from tiers.policies.base import K
from tiers.policies.lru import Lru


class PrefixLru(Lru[K]):
    """LRU that evicts no parent before its child, since a suffix without its prefix is useless.

    In a node it equals `Lru`, because there every policy respects chains (invariant 6).
    """

    is_leaves_only: ClassVar[bool] = True
