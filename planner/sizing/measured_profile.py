"""A measured profile (`kvpool worker profile`) in the place of the figures computed for a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from conductor.scheduling.cost_model import LinkProfile, Profile
from conductor.scheduling.cost_profile import parse_measured, read_content


@dataclass(slots=True, frozen=True)
class MeasuredProfile:
    """What one instance was measured to take, and how many tokens of KV it holds (0: as its GPU has room for)."""

    cost: Profile
    kv_capacity_tokens: int
    source: str


def read_profile(path: Path, same_host: LinkProfile, other_host: LinkProfile) -> MeasuredProfile:
    """A profile from a file; links are the cluster's unless the file names them.

    Raises:
        ConfigError: it cannot be read, or holds no profile.
    """
    cost, room = parse_measured(read_content(path), str(path), same_host, other_host)
    return MeasuredProfile(cost, room, str(path))
