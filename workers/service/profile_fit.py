"""Fits the coefficients of a cost profile to measured samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np

from kvpool.config.profile_file import VERSION, DecodeCost, PrefillCost, ProfileFile
from kvpool.errors import InvalidArgument

SMALLEST_SHARE = 1e-3  # of a sample, given to a coefficient that measured as zero

PrefillSample = tuple[int, int, float]  # new tokens, reused tokens, seconds
DecodeSample = tuple[int, int, float]  # tokens of context over the batch, sequences, seconds a step


def fit_prefill(samples: Sequence[PrefillSample]) -> PrefillCost:
    """The coefficients with the smallest relative errors over the samples.

    Raises:
        InvalidArgument: no samples, or a time that is not positive.
    """
    rows = [(1.0, new, new * (reused + new / 2)) for new, reused, _ in samples]
    return PrefillCost(*_fit(rows, [seconds for *_, seconds in samples]))


def fit_decode(samples: Sequence[DecodeSample]) -> DecodeCost:
    """The coefficients with the smallest relative errors over the samples.

    Raises:
        InvalidArgument: no samples, or a time that is not positive.
    """
    rows = [(1.0, float(context), float(batch)) for context, batch, _ in samples]
    return DecodeCost(*_fit(rows, [seconds for *_, seconds in samples]))


def fit_profile(
    prefill: Sequence[PrefillSample], decode: Sequence[DecodeSample], model: str, device: str
) -> ProfileFile:
    """A profile with the fitted coefficients and the samples behind them.

    Raises:
        InvalidArgument: no samples, or a time that is not positive.
    """
    return ProfileFile(
        VERSION,
        model,
        device,
        fit_prefill(prefill),
        fit_decode(decode),
        measured={
            "prefill": [list(sample) for sample in prefill],
            "decode": [list(sample) for sample in decode],
        },
    )


def _fit(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[float, float, float]:
    """Least squares of relative errors with no negative coefficient.

    There are three unknowns, so every subset of nonzero ones is tried. A coefficient that measured
    as zero gets a share of the samples too small to matter, because the conductor scales
    coefficients as it learns and could never raise a zero.
    """
    if not rows or min(seconds) <= 0:
        raise InvalidArgument("fitting a profile needs samples with positive times")
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
    smallest = SMALLEST_SHARE / x.max(axis=0)
    a, b, c = (best[1].get(i, float(smallest[i])) for i in range(x.shape[1]))
    return a, b, c
