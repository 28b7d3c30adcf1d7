"""Exponential moving averages of measurements."""

from __future__ import annotations


def smoothed(average: float, measured: float, weight: float = 0.3) -> float:
    """The moving average after one more measurement.

    Args:
        average: the average so far; 0 if nothing was measured yet.
        weight: share of the new measurement.
    """
    return average + weight * (measured - average) if average else measured
