"""Turns a profile file into the starting values of the cost model."""

from __future__ import annotations

from pathlib import Path

from conductor.scheduling.cost_model import LinkProfile, Profile
from kvpool.blocks.tier import Tier
from kvpool.config.profile_file import LinkCost, ProfileFile, read_profile_file
from kvpool.errors import ConfigError, InvalidArgument


def profile_from_file(
    file: ProfileFile,
    source: str,
    same_host: LinkProfile | None = None,
    other_host: LinkProfile | None = None,
) -> Profile:
    """The cost model's profile; `source` names the file in errors.

    Args:
        same_host, other_host: links if the file has none; None means the default ones.

    Raises:
        ConfigError: a figure is not positive.
    """
    default = Profile()
    prefill, tpot = file.prefill, file.tpot
    try:
        return Profile(
            prefill.base_s if prefill else default.prefill_base_s,
            prefill.token_s if prefill else default.prefill_token_s,
            prefill.attention_s if prefill else default.prefill_attention_s,
            tpot.base_s if tpot else default.tpot_base_s,
            tpot.context_s if tpot else default.tpot_context_s,
            tpot.sequence_s if tpot else default.tpot_sequence_s,
            _link(file.same_host, same_host or default.same_host),
            _link(file.other_host, other_host or default.other_host),
            default.tier_bytes_per_s
            | {Tier[name.upper()]: rate for name, rate in file.tier_bytes_per_s.items()},
        )
    except InvalidArgument as error:
        raise ConfigError(
            f"{source} is not a profile: {error}", hint="kvpool worker profile writes one"
        ) from None


def read_profile(path: Path) -> Profile:
    """Read the profile in a YAML or JSON file.

    Raises:
        ConfigError: the file cannot be read, is not a profile, or holds a figure that is not
            positive.
    """
    return profile_from_file(read_profile_file(path), str(path))


def _link(given: LinkCost | None, default: LinkProfile) -> LinkProfile:
    return LinkProfile(given.latency_s, given.bytes_per_s) if given else default
