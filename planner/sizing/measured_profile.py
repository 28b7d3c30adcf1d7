"""A profile measured by `kvpool worker profile`, used instead of the figures computed for a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from conductor.scheduling.cost_model import LinkProfile, Profile
from conductor.scheduling.cost_profile import profile_from_file
from kvpool.config.profile_file import read_profile_file


@dataclass(slots=True, frozen=True)
class MeasuredProfile:
    """Measured costs of one instance, and its KV capacity in tokens (0: computed from its GPU's memory)."""

    cost: Profile
    kv_capacity_tokens: int
    source: str


def read_profile(path: Path, same_host: LinkProfile, other_host: LinkProfile) -> MeasuredProfile:
    """Read a profile. The given links apply unless the file has its own.

    Raises:
        ConfigError: the file cannot be read or is not a profile.
    """
    file = read_profile_file(path)
    cost = profile_from_file(file, str(path), same_host, other_host)
    return MeasuredProfile(cost, file.kv_capacity_tokens, str(path))
