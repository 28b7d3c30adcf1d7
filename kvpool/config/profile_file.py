"""The file of measured costs: `kvpool worker profile` writes it.

The conductor and the planner read it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml

from kvpool.config.strict_yaml import read_yaml
from kvpool.errors import ConfigError

VERSION = 1


class PrefillCost(msgspec.Struct, forbid_unknown_fields=True):
    """Seconds of a prefill: fixed, for each new token, and for each pair of tokens in attention."""

    base_s: float
    token_s: float
    attention_s: float


class DecodeCost(msgspec.Struct, forbid_unknown_fields=True):
    """Seconds of a decode step: fixed, for each token of context, and for each sequence."""

    base_s: float
    context_s: float
    sequence_s: float


class LinkCost(msgspec.Struct, forbid_unknown_fields=True):
    """Latency and bandwidth between two processes."""

    latency_s: float
    bytes_per_s: float


class ProfileFile(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The content of the file. Missing fields keep the reader's defaults.

    `measured`: the samples of the coefficients. `kv_capacity_tokens`: tokens of KV that fit the
    engine; 0: unknown.
    """

    kvpool_profile: int  # the format's version
    model: str = ""
    device: str = ""
    prefill: PrefillCost | None = None
    tpot: DecodeCost | None = None
    same_host: LinkCost | None = None
    other_host: LinkCost | None = None
    tier_bytes_per_s: dict[Literal["hbm", "dram", "nvme"], float] = {}
    measured: dict[str, list[list[float]]] = {}
    kv_capacity_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0


def parse_profile_file(content: Any, source: str) -> ProfileFile:
    """Check the decoded content of a profile; `source` names it in errors.

    Raises:
        ConfigError: unknown field, wrong type, or another version.
    """
    try:
        file = msgspec.convert(content, ProfileFile)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{source} is not a profile: {error}", hint="kvpool worker profile writes one"
        ) from None
    if file.kvpool_profile != VERSION:
        raise ConfigError(
            f"{source} is a profile of version {file.kvpool_profile}",
            hint=f"this release reads version {VERSION}; measure again: kvpool worker profile",
        )
    return file


def read_profile_file(path: Path) -> ProfileFile:
    """Read a profile: JSON if the name ends in .json, otherwise YAML.

    Raises:
        ConfigError: the file cannot be read or is not a profile.
    """
    if path.suffix != ".json":
        return parse_profile_file(read_yaml(path), str(path))
    try:
        content = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read file {path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"file {path} is not valid JSON: {error}") from None
    return parse_profile_file(content, str(path))


def write_profile_file(path: Path, file: ProfileFile) -> None:
    """Write a profile: JSON if the name ends in .json, otherwise YAML."""
    content = msgspec.to_builtins(file)
    is_json = path.suffix == ".json"
    path.write_text(
        json.dumps(content, indent=2) + "\n"
        if is_json
        else yaml.safe_dump(content, sort_keys=False)
    )
