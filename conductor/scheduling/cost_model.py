"""Predicts seconds for prefill, decode steps and transfers, with fits that learn from measurements.

    prefill   a + b * new + c * new * (reused + new / 2)   linear work, attention over the prefix
    TPOT      d + e * context + f * batch                  KV read in a step, work per sequence
    transfer  latency + bytes / bandwidth                  per (same host or other, transport), tier

The prefill form is DistServe's (OSDI'24, latency model: GEMMs linear, attention quadratic in
length), extended by a reused prefix as in Mooncake's EstimatePrefillExecutionTime (FAST'25,
Algorithm 1). The TPOT form follows Splitwise's and DistServe's decode models (memory-bound: linear
in KV read and in batch). Transfer is the usual alpha-beta model, Algorithm 1's
EstimateKVCacheTransferTime without its queue.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import mul

from kvpool.blocks.tier import Tier
from kvpool.bounded import BoundedDict
from kvpool.errors import InvalidArgument

MIN_PREDICTION_S = 1e-6
MEASURED = 3  # measurements after which a worker's fit is trusted enough to refuse a request by it
LEAST_WAIT_S = 1e-3  # means "do not wait"; 0 would mean "no limit"
QUEUE_PROBE_TOKENS = 1024  # assumed length of queued prompts whose lengths are unknown


@dataclass(slots=True, frozen=True)
class LinkProfile:
    """Latency and bandwidth of one kind of network path."""

    latency_s: float
    bytes_per_s: float


@dataclass(slots=True, frozen=True)
class Profile:
    """Starting values of the fits: seconds per unit, all positive.

    The defaults describe a small model on a CPU (SmolLM2-135M: 735 tokens/s at 1k, 515 at 4k) and
    NIXL without RDMA. They must be right within an order of magnitude only; measurements correct
    them.

    Raises:
        InvalidArgument: a figure is not positive and finite.
    """

    prefill_base_s: float = 5e-3  # a
    prefill_token_s: float = 1.17e-3  # b
    prefill_attention_s: float = 3.8e-7  # c, per pair of tokens
    tpot_base_s: float = 2e-2  # d
    tpot_context_s: float = 2e-6  # e, per token of KV read
    tpot_sequence_s: float = 2e-3  # f
    same_host: LinkProfile = LinkProfile(5e-4, 7e9)
    other_host: LinkProfile = LinkProfile(2e-3, 1.1e9)
    tier_bytes_per_s: dict[Tier, float] = field(default_factory=lambda: {Tier.NVME: 2.5e9})

    def __post_init__(self) -> None:
        figures = [
            *(self.prefill_base_s, self.prefill_token_s, self.prefill_attention_s),
            *(self.tpot_base_s, self.tpot_context_s, self.tpot_sequence_s),
            *(self.same_host.latency_s, self.same_host.bytes_per_s),
            *(self.other_host.latency_s, self.other_host.bytes_per_s),
            *self.tier_bytes_per_s.values(),
        ]
        if not all(math.isfinite(figure) and figure > 0 for figure in figures):
            raise InvalidArgument("every figure of a cost profile must be positive and finite")

    def prefill_s(self, new: int, reused: int = 0) -> float:
        """Seconds to compute `new` tokens after `reused` ones."""
        attention_s = self.prefill_attention_s * new * (reused + new / 2)
        return self.prefill_base_s + self.prefill_token_s * new + attention_s

    def tpot_s(self, context: float, batch: int) -> float:
        """Seconds of a decode step of `batch` sequences with `context` tokens in total."""
        return self.tpot_base_s + self.tpot_context_s * context + self.tpot_sequence_s * batch


class OnlineFit:
    """A fit of y = sum(weight[i] * seed[i] * x[i]) by weighted recursive least squares.

    Weights of observations decrease exponentially. Errors are relative to the prediction, so that a
    short prompt counts as much as a long one. An error is clipped at three times the usual one
    (Huber), so that an outlier moves little. Four clipped errors in a row with the same sign are a
    change and not outliers; the fit then follows at full gain. Weights start at 1 (the seed) and
    stay positive, and so do predictions.

    Args:
        seed: positive coefficients to start from.
        forget: share of its importance that an observation keeps when the next one arrives.
    """

    __slots__ = (
        "_covariance",
        "_forget",
        "_run",
        "_seed",
        "_usual",
        "coefficients",
        "observations",
        "weights",
    )

    # Variance of a weight over that of the noise: seeds may be far off, noise is about 20 %.
    _START = 25.0
    _LEAST = 1e-3  # lower bound of a weight: a fit could never raise a coefficient of zero again
    _CHANGE = 4  # clipped errors in a row with the same sign
    _LARGEST = 10.0  # largest relative error that one step follows

    def __init__(self, seed: Sequence[float], forget: float = 0.98) -> None:
        size = len(seed)
        self._seed = tuple(seed)
        self._forget = forget
        self._usual = 0.1  # usual relative error
        self._run = 0  # clipped errors in a row, with their sign
        self.weights = [1.0] * size
        self.coefficients = self._seed
        self.observations = 0
        self._covariance = self._fresh_covariance(size)

    def predict(self, features: Sequence[float]) -> float:
        """Predicted seconds, at least a microsecond."""
        # Called some hundred times per decision, so no Python code runs per term.
        total: float = sum(map(mul, self.coefficients, features))
        return max(total, MIN_PREDICTION_S)

    def observe(self, features: Sequence[float], seconds: float) -> None:
        """Learn from one measurement. A value that is not positive and finite is ignored."""
        if not (math.isfinite(seconds) and seconds > 0 and all(map(math.isfinite, features))):
            return
        if min(features) < 0 or not any(features):
            return
        predicted = self.predict(features)
        z = [s * x / predicted for s, x in zip(self._seed, features, strict=True)]
        error = seconds / predicted - 1.0
        limit = 3.0 * self._usual
        cut = max(-limit, min(limit, error))
        if cut == error:
            self._run = 0
        else:
            self._run = max(self._run, 0) + 1 if error > 0 else min(self._run, 0) - 1
            if abs(self._run) >= self._CHANGE:
                self._covariance = self._fresh_covariance(len(z))
                cut = min(error, self._LARGEST)
        self._usual = max(0.05, 0.9 * self._usual + 0.1 * min(abs(error), limit))

        pz = [sum(c * v for c, v in zip(row, z, strict=True)) for row in self._covariance]
        gain_scale = self._forget + sum(v * p for v, p in zip(z, pz, strict=True))
        gain = [p / gain_scale for p in pz]
        self.weights = [
            max(self._LEAST, w + g * cut) for w, g in zip(self.weights, gain, strict=True)
        ]
        self.coefficients = tuple(map(mul, self.weights, self._seed))
        # Forget only below the starting variance, so that a constant load does not blow it up.
        grow = 1.0
        if max(row[i] for i, row in enumerate(self._covariance)) < self._START:
            grow = 1.0 / self._forget
        size = len(z)
        for i in range(size):
            for j in range(i, size):
                value = (self._covariance[i][j] - gain[i] * pz[j]) * grow
                self._covariance[i][j] = self._covariance[j][i] = value
        self.observations += 1

    def _fresh_covariance(self, size: int) -> list[list[float]]:
        return [[self._START if i == j else 0.0 for j in range(size)] for i in range(size)]


class CostModel:
    """Predictions per worker and per kind of link. Each fit starts from the profile and learns.

    Args:
        max_workers: fits to keep; the oldest one is dropped first.
    """

    def __init__(self, profile: Profile | None = None, max_workers: int = 4096) -> None:
        self.profile = profile or Profile()
        self._prefill: BoundedDict[str, OnlineFit] = BoundedDict(max_workers)
        self._tpot: BoundedDict[str, OnlineFit] = BoundedDict(max_workers)
        self._links: dict[tuple[bool, str], OnlineFit] = {}
        # The predictions before the first measurement; these fits never learn.
        self._fresh_prefill, self._fresh_tpot = self._prefill_seed(), self._tpot_seed()
        self._fresh_links = {near: self._link_seed(near) for near in (False, True)}

    # ------------------------------------------------------------ predictions, in seconds

    def prefill_s(self, worker_id: str, new_tokens: int, reused_tokens: int = 0) -> float:
        """Time to compute `new_tokens` after `reused_tokens` whose KV is present; 0 for none."""
        if new_tokens <= 0:
            return 0.0
        fit = self._prefill.get(worker_id) or self._fresh_prefill
        return fit.predict(_prefill_features(new_tokens, reused_tokens))

    def queue_s(self, worker_id: str, queued_tokens: int, tokens_per_s: float = 0.0) -> float:
        """Time to compute a queue of prompts of unknown lengths.

        Args:
            tokens_per_s: the worker's own measurement; 0 if unknown.
        """
        if queued_tokens <= 0:
            return 0.0
        if tokens_per_s > 0:
            return queued_tokens / tokens_per_s
        probe = min(queued_tokens, QUEUE_PROBE_TOKENS)
        return self.prefill_s(worker_id, probe) * queued_tokens / probe

    def tpot_s(self, worker_id: str, context_tokens: float, batch: float) -> float:
        """Time of a decode step over `batch` sequences with `context_tokens` of KV in total."""
        fit = self._tpot.get(worker_id) or self._fresh_tpot
        return fit.predict((1.0, max(0.0, context_tokens), max(0.0, batch)))

    def transfer_s(
        self, size_bytes: float, *, same_host: bool, transport: str = "", tier: Tier = Tier.DRAM
    ) -> float:
        """Time to move `size_bytes` in one transfer.

        A slow tier is read first, at its own rate. The time is 0 for no bytes.
        """
        if size_bytes <= 0:
            return 0.0
        fit = self._links.get((same_host, transport)) or self._fresh_links[same_host]
        return fit.predict((1.0, size_bytes)) + self.tier_s(size_bytes, tier)

    def tier_s(self, size_bytes: float, tier: Tier, bytes_per_s: float = 0.0) -> float:
        """Time to read `size_bytes` from a slow tier into memory. 0 for a fast tier.

        Args:
            bytes_per_s: rate that the node measured; 0 while unknown.
        """
        rate = bytes_per_s or self.profile.tier_bytes_per_s.get(tier)
        return size_bytes / rate if rate else 0.0

    def worthwhile_s(self, worker_id: str, tokens: int, reused_tokens: int, link_s: float) -> float:
        """The longest wait with which reusing is no slower than computing all `tokens`; 0: unknown.

        Args:
            link_s: additional time to move the reused tokens.
        """
        if reused_tokens <= 0 or self.prefill_samples(worker_id) < MEASURED:
            return 0.0
        rest = max(1, tokens - reused_tokens)
        saved_s = self.prefill_s(worker_id, tokens) - self.prefill_s(worker_id, rest, tokens - rest)
        return max(LEAST_WAIT_S, saved_s - link_s)

    # ------------------------------------------------------------ measurements

    def observe_prefill(
        self, worker_id: str, new_tokens: int, reused_tokens: int, seconds: float
    ) -> None:
        """Learn from one prefill: `seconds` of computation, without queue and transfers."""
        if new_tokens <= 0 or reused_tokens < 0:
            return
        fit = self._of_worker(self._prefill, worker_id, self._prefill_seed)
        fit.observe(_prefill_features(new_tokens, reused_tokens), seconds)

    def observe_tpot(
        self, worker_id: str, context_tokens: float, batch: float, seconds: float
    ) -> None:
        """Learn from one decode step; a worker's heartbeat holds all three figures."""
        if batch <= 0 or context_tokens < 0:
            return
        fit = self._of_worker(self._tpot, worker_id, self._tpot_seed)
        fit.observe((1.0, context_tokens, batch), seconds)

    def observe_transfer(
        self,
        size_bytes: float,
        seconds: float,
        *,
        same_host: bool,
        transport: str = "",
        tier: Tier = Tier.DRAM,
    ) -> None:
        """Learn from one transfer. The time of a slow tier is subtracted first."""
        if size_bytes <= 0:
            return
        rate = self.profile.tier_bytes_per_s.get(tier)
        link_s = seconds - (size_bytes / rate if rate else 0.0)
        fit = self._links.get((same_host, transport))
        if fit is None:
            fit = self._links[same_host, transport] = self._link_seed(same_host)
        fit.observe((1.0, size_bytes), link_s)

    def prefill_samples(self, worker_id: str) -> int:
        """Number of prefills that the worker's fit learned from; 0: the profile predicts."""
        fit = self._prefill.get(worker_id)
        return fit.observations if fit is not None else 0

    def tpot_samples(self, worker_id: str) -> int:
        """Number of decode steps of this worker that the fit learned from."""
        fit = self._tpot.get(worker_id)
        return fit.observations if fit is not None else 0

    def forget_worker(self, worker_id: str) -> None:
        """Drop the fits of a worker that has left."""
        self._prefill.pop(worker_id, None)
        self._tpot.pop(worker_id, None)

    # ------------------------------------------------------------ inside

    def _of_worker(
        self, fits: dict[str, OnlineFit], worker_id: str, seed: Callable[[], OnlineFit]
    ) -> OnlineFit:
        fit = fits.get(worker_id)
        if fit is None:
            fit = fits[worker_id] = seed()
        return fit

    def _prefill_seed(self) -> OnlineFit:
        p = self.profile
        return OnlineFit((p.prefill_base_s, p.prefill_token_s, p.prefill_attention_s))

    def _tpot_seed(self) -> OnlineFit:
        p = self.profile
        return OnlineFit((p.tpot_base_s, p.tpot_context_s, p.tpot_sequence_s))

    def _link_seed(self, same_host: bool) -> OnlineFit:
        link = self.profile.same_host if same_host else self.profile.other_host
        return OnlineFit((link.latency_s, 1.0 / link.bytes_per_s))


def _prefill_features(new_tokens: int, reused_tokens: int) -> tuple[float, float, float]:
    return (1.0, float(new_tokens), new_tokens * (reused_tokens + new_tokens / 2))


def exposed_s(prefill_s: float, transfer_s: float, layers: int) -> float:
    """The part of a layer-wise transfer after the prefill: at least the last layer.

    Layers are equal. A layer is sent once it is computed and once the layer before it has left. If
    the link is slower than the prefill, its whole backlog is exposed.
    """
    slowest_is_link = prefill_s / layers + transfer_s
    slowest_is_compute = prefill_s + transfer_s / layers
    return max(slowest_is_link, slowest_is_compute) - prefill_s
