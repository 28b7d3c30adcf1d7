"""Measured cost profiles: a JSON file with the fields of `conductor.cost.Profile` and the engine's KV room."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from conductor.cost import LinkProfile, Profile
from kvpool.errors import ConfigError, InvalidArgument


class _File(msgspec.Struct, forbid_unknown_fields=True):
    prefill_base_s: float
    prefill_token_s: float
    prefill_attention_s: float
    tpot_base_s: float
    tpot_context_s: float
    tpot_sequence_s: float
    kv_capacity_tokens: int
    source: str = ""


@dataclass(slots=True, frozen=True)
class MeasuredProfile:
    """What one instance was measured to take, and how many tokens of KV it holds."""

    cost: Profile
    kv_capacity_tokens: int
    source: str


def read_profile(path: Path, same_host: LinkProfile, other_host: LinkProfile) -> MeasuredProfile:
    """A profile from a file; links come from the cluster, not from it.

    Raises:
        ConfigError: it cannot be read, or a figure is missing or makes no sense.
    """
    try:
        found = msgspec.json.decode(path.read_bytes(), type=_File)
        cost = Profile(
            found.prefill_base_s,
            found.prefill_token_s,
            found.prefill_attention_s,
            found.tpot_base_s,
            found.tpot_context_s,
            found.tpot_sequence_s,
            same_host,
            other_host,
        )
    except OSError as error:
        raise ConfigError(f"cannot read profile {path}: {error.strerror or error}") from None
    except (msgspec.DecodeError, InvalidArgument) as error:
        raise ConfigError(f"profile {path}: {error}") from None
    if found.kv_capacity_tokens < 1:
        raise ConfigError(f"profile {path}: kv_capacity_tokens is {found.kv_capacity_tokens}")
    return MeasuredProfile(cost, found.kv_capacity_tokens, found.source or str(path))
