"""Predicts when a record will be used again: a hazard rate by age, learned online.

A record is a set of blocks last used together. The chance that it returns within an age bin, given
that it has not returned before, is a logistic function of a base by age and of weights by feature,
which are smooth in log age. The model learns from every outcome, also from those of records evicted
long ago.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

EDGES_S = np.array(
    [
        *(0, 4, 8, 13, 19, 25, 31, 37, 43, 49, 55, 64, 73, 85, 100, 118, 140, 170),
        *(205, 250, 310, 390, 500, 700, 1000, 1400, 2000),
    ],
    np.float64,
)  # of the age bins; finer than human pauses vary, coarse enough to learn from few samples
BINS = len(EDGES_S) - 1
_WIDTHS_S = np.diff(EDGES_S)
_KNOTS_S = np.array(
    [10.0, 40.0, 100.0, 250.0, 800.0]
)  # where a feature's effect may change with age
_STEP = 0.25  # of AdaGrad
_BASE_STEP = 0.15
# Before anything is learned, the hazard falls with age, so the order is that of recency.
_PRIOR, _PRIOR_AGE_S = 0.25, 20.0


class HazardModel:
    """Additive in the features. Each feature is given as a row number of the weights.

    Args:
        rows: of the weights.
    """

    def __init__(self, rows: int) -> None:
        middle = np.log((EDGES_S[1:] + np.maximum(EDGES_S[:-1], 2.0)) / 2)
        knots = np.log(_KNOTS_S)
        self._basis: Floats = np.stack(
            [np.interp(middle, knots, one) for one in np.eye(len(knots))], axis=1
        )
        self._weights: Floats = np.zeros((rows, len(knots)))
        self._weight_norms: Floats = np.ones((rows, len(knots)))
        self._base: Floats = np.log(
            _PRIOR * np.minimum(1.0, _WIDTHS_S / (EDGES_S[1:] + _PRIOR_AGE_S))
        )
        self._base_norms: Floats = np.ones(BINS)
        self._is_later = np.triu(np.ones((BINS, BINS), bool))

    def learn(
        self, features: Sequence[tuple[int, ...]], bins: Sequence[int], returned: Sequence[bool]
    ) -> None:
        """Take one step of AdaGrad on records that reached these bins, and whether they returned in them."""
        chosen = np.array(features)
        at = np.array(bins)
        basis = self._basis[at]
        logits = (self._weights[chosen].sum(1) * basis).sum(1) + self._base[at]
        error = _logistic(logits) - np.array(returned, np.float64)
        self._base_norms += np.bincount(at, error * error, BINS)
        self._base -= _BASE_STEP * np.bincount(at, error, BINS) / np.sqrt(self._base_norms)
        gradient = error[:, None] * basis
        rows, count = self._weights.shape
        flat = (chosen[:, :, None] * count + np.arange(count)).ravel()
        each = np.broadcast_to(gradient[:, None, :], (*chosen.shape, count)).ravel()
        shape, size = (rows, count), rows * count
        self._weight_norms += np.bincount(flat, each * each, size).reshape(shape)
        step = np.bincount(flat, each, size).reshape(shape)
        self._weights -= _STEP * step / np.sqrt(self._weight_norms)

    def indices(self, features: Sequence[tuple[int, ...]]) -> Floats:
        """For each record and age bin, the most returns per second in the cache that keeping it can give.

        A Gittins index: the maximum over all horizons of the chance to return by then, divided by
        the expected time until the return or the horizon. Shape (records, BINS).
        """
        hazard = _logistic(self._weights[np.array(features)].sum(1) @ self._basis.T + self._base)
        count = len(hazard)
        alive = np.ones((count, BINS + 1))
        np.cumprod(1.0 - hazard, axis=1, out=alive[:, 1:])
        held = np.zeros((count, BINS + 1))
        np.cumsum((alive[:, :-1] + alive[:, 1:]) / 2 * _WIDTHS_S, axis=1, out=held[:, 1:])
        gain = alive[:, :BINS, None] - alive[:, None, 1:]
        cost = np.where(self._is_later, held[:, None, 1:] - held[:, :BINS, None], 1.0)
        best: Floats = np.where(self._is_later, gain / np.maximum(cost, 1e-12), 0.0).max(2)
        return best


def age_bins(ages_s: Floats) -> npt.NDArray[Any]:
    """The bin of each age. The last bin also holds all larger ages."""
    return np.minimum(np.searchsorted(EDGES_S, ages_s, side="right") - 1, BINS - 1)


def _logistic(logits: Floats) -> Floats:
    # exp would overflow far outside, where the result no longer changes.
    result: Floats = 1.0 / (1.0 + np.exp(-np.clip(logits, -30.0, 30.0)))
    return result
