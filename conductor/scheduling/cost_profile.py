"""Profiles of the cost model: fitted to measurements, written to a file, read at start.

The file is YAML or JSON; what it leaves out keeps its default. `kvpool worker profile` writes one.
Fitting and parsing are pure; `read_profile` alone opens a file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import yaml

from conductor.scheduling.cost_model import LinkProfile, Profile
from kvpool.errors import ConfigError, InvalidArgument

VERSION = 1
LEAST = 1e-3  # share of a sample that a coefficient which measured as nothing is given

PrefillSample = tuple[int, int, float]  # new tokens, reused tokens, seconds
DecodeSample = tuple[int, int, float]  # tokens of context over the batch, sequences, seconds a step


class _Prefill(msgspec.Struct, forbid_unknown_fields=True):
    base_s: float
    token_s: float
    attention_s: float


class _Tpot(msgspec.Struct, forbid_unknown_fields=True):
    base_s: float
    context_s: float
    sequence_s: float


class _Link(msgspec.Struct, forbid_unknown_fields=True):
    latency_s: float
    bytes_per_s: float


class _File(msgspec.Struct, forbid_unknown_fields=True):
    kvpool_profile: int
    model: str = ""
    device: str = ""
    prefill: _Prefill | None = None
    tpot: _Tpot | None = None
    same_host: _Link | None = None
    other_host: _Link | None = None
    tier_bytes_per_s: dict[str, float] = {}
    measured: dict[str, list[list[float]]] = {}
    kv_capacity_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0  # of the engine; 0: not told


def fit_prefill(samples: Sequence[PrefillSample]) -> tuple[float, float, float]:
    """Base, seconds a token, seconds a pair of tokens: those that fit best, relative to each sample.

    Raises:
        InvalidArgument: no sample.
    """
    rows = [(1.0, new, new * (reused + new / 2)) for new, reused, _ in samples]
    return _fit(rows, [seconds for *_, seconds in samples])


def fit_tpot(samples: Sequence[DecodeSample]) -> tuple[float, float, float]:
    """Base, seconds a token of context, seconds a sequence. Raises: as `fit_prefill`."""
    rows = [(1.0, float(context), float(batch)) for context, batch, _ in samples]
    return _fit(rows, [seconds for *_, seconds in samples])


def document(
    prefill: Sequence[PrefillSample], decode: Sequence[DecodeSample], model: str, device: str
) -> dict[str, Any]:
    """What a profile's file holds: coefficients, and the measurements that they come from."""
    names = (("base_s", "token_s", "attention_s"), ("base_s", "context_s", "sequence_s"))
    return {
        "kvpool_profile": VERSION,
        "model": model,
        "device": device,
        "prefill": dict(zip(names[0], fit_prefill(prefill), strict=True)),
        "tpot": dict(zip(names[1], fit_tpot(decode), strict=True)),
        "measured": {
            "prefill": [list(sample) for sample in prefill],
            "decode": [list(sample) for sample in decode],
        },
    }


def parse_profile(content: Any, where: str) -> Profile:
    """A profile from a file's content, already decoded; see `parse_measured`."""
    return parse_measured(content, where)[0]


def parse_measured(
    content: Any,
    where: str,
    same_host: LinkProfile | None = None,
    other_host: LinkProfile | None = None,
) -> tuple[Profile, int]:
    """The same, and the tokens of KV that the engine holds, 0 where the file does not say.

    Args:
        same_host, other_host: links where the file names none, instead of the default ones.

    Raises:
        ConfigError: an unknown field, a wrong type, another version, or a figure that is not positive.
    """
    default = Profile()
    try:
        file = msgspec.convert(content, _File)
        if file.kvpool_profile != VERSION:
            raise ConfigError(f"{where}: a profile of version {file.kvpool_profile}")
        prefill = file.prefill or _Prefill(
            default.prefill_base_s, default.prefill_token_s, default.prefill_attention_s
        )
        tpot = file.tpot or _Tpot(
            default.tpot_base_s, default.tpot_context_s, default.tpot_sequence_s
        )
        profile = Profile(
            prefill.base_s,
            prefill.token_s,
            prefill.attention_s,
            tpot.base_s,
            tpot.context_s,
            tpot.sequence_s,
            _link(file.same_host, same_host or default.same_host),
            _link(file.other_host, other_host or default.other_host),
            default.tier_bytes_per_s | file.tier_bytes_per_s,
        )
    except (msgspec.ValidationError, InvalidArgument) as error:
        raise ConfigError(
            f"{where} is no profile: {error}", hint="kvpool worker profile writes one"
        ) from None
    return profile, file.kv_capacity_tokens


def read_profile(path: Path) -> Profile:
    """The profile in a YAML or JSON file.

    Raises:
        ConfigError: it cannot be read, or as `parse_measured`.
    """
    return parse_profile(read_content(path), str(path))


def read_content(path: Path) -> Any:
    """What a profile's file holds, not checked yet.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"the profile {path} cannot be read: {reason}") from None


def _link(given: _Link | None, default: LinkProfile) -> LinkProfile:
    return LinkProfile(given.latency_s, given.bytes_per_s) if given else default


def _fit(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[float, float, float]:
    """Least squares of relative errors with no coefficient below zero.

    With three unknowns every set of those that are not zero can be tried. What measures as nothing gets a
    share of the samples that does not show, because a fit that starts at zero could never learn better.
    """
    if not rows or min(seconds) <= 0:
        raise InvalidArgument("a fit needs measurements, all of them positive")
    x = np.array(rows) / np.array(seconds)[:, None]
    best: tuple[float, Mapping[int, float]] | None = None
    for size in range(1, x.shape[1] + 1):
        for columns in combinations(range(x.shape[1]), size):
            found, *_ = np.linalg.lstsq(x[:, columns], np.ones(len(x)), rcond=None)
            if (found <= 0).any():
                continue
            error = float(np.sum((x[:, columns] @ found - 1.0) ** 2))
            if best is None or error < best[0] - 1e-12:
                best = (error, dict(zip(columns, found.tolist(), strict=True)))
    assert best is not None  # a single positive column always has a positive coefficient
    least = LEAST / x.max(axis=0)
    a, b, c = (best[1].get(i, float(least[i])) for i in range(x.shape[1]))
    return a, b, c


__all__ = [
    "DecodeSample",
    "PrefillSample",
    "document",
    "fit_prefill",
    "fit_tpot",
    "parse_profile",
    "read_profile",
]
