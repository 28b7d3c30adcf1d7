from tiers.policies.base import Candidate, EvictionPolicy
from tiers.policies.cost import prefill_cost
from tiers.policies.lazy_heap import LazyHeap
from tiers.policies.registry import DEFAULT, POLICIES, create, policy_class

__all__ = [
    "DEFAULT",
    "POLICIES",
    "Candidate",
    "EvictionPolicy",
    "LazyHeap",
    "create",
    "policy_class",
    "prefill_cost",
]
