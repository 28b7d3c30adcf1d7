"""Eviction policies: one contract, one file for each, by name; usable without a store (`BlockCache`)."""

from tiers.policies.base import Candidate, EvictionPolicy
from tiers.policies.cache import BlockCache
from tiers.policies.cost import prefill_cost
from tiers.policies.heap import LazyHeap
from tiers.policies.registry import DEFAULT, POLICIES, create, policy_class

__all__ = [
    "DEFAULT",
    "POLICIES",
    "BlockCache",
    "Candidate",
    "EvictionPolicy",
    "LazyHeap",
    "create",
    "policy_class",
    "prefill_cost",
]
