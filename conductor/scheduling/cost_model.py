"""What things cost in seconds: prefill, decode steps and transfers, fitted online to what was measured.

    prefill   a + b * new + c * new * (reused + new / 2)      linear work, and attention over the prefix
    TPOT      d + e * context + f * batch                     KV read in a step, and work per sequence
    transfer  latency + bytes / bandwidth                     per (same host or other, transport), and tier

The prefill form is DistServe's (OSDI'24, latency model: GEMMs linear, attention quadratic in length),
extended by a reused prefix as in Mooncake's EstimatePrefillExecutionTime (FAST'25, Algorithm 1); the TPOT
form follows Splitwise's and DistServe's decode models (memory-bound: linear in KV read and in batch).
Transfer is the usual alpha-beta model, Algorithm 1's EstimateKVCacheTransferTime without its queue.

Pure: no I/O, no clock. It predicts; it decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import mul

from kvpool.bounded import BoundedDict
from kvpool.errors import InvalidArgument

MIN_PREDICTION_S = 1e-6
MEASURED = (
    3  # measurements from which on a worker's fit is trusted enough to refuse or decline by it
)
LEAST_WAIT_S = 1e-3  # a wait that is worth nothing; 0 would mean any
QUEUE_PROBE_TOKENS = 1024  # prompt length at which a queue of unknown prompts is priced


@dataclass(slots=True, frozen=True)
class LinkProfile:
    """One kind of path for bytes."""

    latency_s: float
    bytes_per_s: float


@dataclass(slots=True, frozen=True)
class Profile:
    """Where fits start from: seconds per unit, all positive.

    The defaults are a small model on a CPU (SmolLM2-135M: 735 tokens/s at 1k, 515 at 4k) and NIXL without
    RDMA; they only have to be right within an order of magnitude, measurements do the rest.

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
    tier_bytes_per_s: dict[str, float] = field(default_factory=lambda: {"nvme": 2.5e9})

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


class OnlineFit:
    """y = sum(weight[i] * seed[i] * x[i]): exponentially weighted recursive least squares.

    Errors are relative to the prediction, so that a short prompt counts as much as a long one. An error is
    cut at three times the usual one (Huber), so that an outlier moves little; four cut errors in a row of
    one sign are no outliers but a change, which is then followed at full gain. Weights start at 1 (the seed) and stay positive, and so do predictions.

    Args:
        seed: positive coefficients to start from.
        forget: share of its importance that an observation keeps when the next one comes.
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

    _START = (
        25.0  # variance of a weight over that of the noise: seeds may be far off, noise is ~20 %
    )
    _LEAST = 1e-3  # a weight's floor: a coefficient of zero could never be told from a useless one
    _CHANGE = 4  # cut errors in a row of one sign
    _LARGEST = 10.0  # relative error followed at most in one step

    def __init__(self, seed: Sequence[float], forget: float = 0.98) -> None:
        size = len(seed)
        self._seed = tuple(seed)
        self._forget = forget
        self._usual = 0.1  # usual relative error
        self._run = 0  # cut errors in a row, with their sign
        self.weights = [1.0] * size
        self.coefficients = self._seed
        self.observations = 0
        self._covariance = self._fresh_covariance(size)

    def predict(self, features: Sequence[float]) -> float:
        """Seconds; at least a microsecond."""
        # Asked some hundred times for each decision: no Python runs per term.
        total: float = sum(map(mul, self.coefficients, features))
        return max(total, MIN_PREDICTION_S)

    def observe(self, features: Sequence[float], seconds: float) -> None:
        """Learn from one measurement; anything not positive and finite is no measurement."""
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
        # Forget only while some variance is left to grow: a constant load must not blow it up.
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
    """Predictions per worker and per kind of link; each starts from the profile and learns.

    Args:
        max_workers: fits kept; beyond it the one that was created first is dropped.
    """

    def __init__(self, profile: Profile | None = None, max_workers: int = 4096) -> None:
        self.profile = profile or Profile()
        self._prefill: BoundedDict[str, OnlineFit] = BoundedDict(max_workers)
        self._tpot: BoundedDict[str, OnlineFit] = BoundedDict(max_workers)
        self._links: dict[tuple[bool, str], OnlineFit] = {}
        # What predictions start from where nothing was measured; never taught.
        self._fresh_prefill, self._fresh_tpot = self._prefill_seed(), self._tpot_seed()
        self._fresh_links = {near: self._link_seed(near) for near in (False, True)}

    # ------------------------------------------------------------ predictions, in seconds

    def prefill_s(self, worker_id: str, new_tokens: int, reused_tokens: int = 0) -> float:
        """Computing `new_tokens` that follow on `reused_tokens` whose KV is there. 0 for none."""
        if new_tokens <= 0:
            return 0.0
        fit = self._prefill.get(worker_id) or self._fresh_prefill
        return fit.predict(_prefill_features(new_tokens, reused_tokens))

    def queue_s(self, worker_id: str, queued_tokens: int, tokens_per_s: float = 0.0) -> float:
        """Computing a queue of prompts of unknown lengths.

        Args:
            tokens_per_s: the worker's own measure; 0 when unknown.
        """
        if queued_tokens <= 0:
            return 0.0
        if tokens_per_s > 0:
            return queued_tokens / tokens_per_s
        probe = min(queued_tokens, QUEUE_PROBE_TOKENS)
        return self.prefill_s(worker_id, probe) * queued_tokens / probe

    def tpot_s(self, worker_id: str, context_tokens: float, batch: float) -> float:
        """One decode step over `batch` sequences that hold `context_tokens` of KV together."""
        fit = self._tpot.get(worker_id) or self._fresh_tpot
        return fit.predict((1.0, max(0.0, context_tokens), max(0.0, batch)))

    def transfer_s(
        self, size_bytes: float, *, same_host: bool, transport: str = "", tier: str = "dram"
    ) -> float:
        """Moving `size_bytes` in one go; a slow tier is read first, at its own rate. 0 for no bytes."""
        if size_bytes <= 0:
            return 0.0
        fit = self._links.get((same_host, transport)) or self._fresh_links[same_host]
        return fit.predict((1.0, size_bytes)) + self.tier_s(size_bytes, tier)

    def tier_s(self, size_bytes: float, tier: str, bytes_per_s: float = 0.0) -> float:
        """Bringing `size_bytes` of a slow tier into memory. 0 for a fast one.

        Args:
            bytes_per_s: as the node measured it; 0 while it does not know.
        """
        rate = bytes_per_s or self.profile.tier_bytes_per_s.get(tier)
        return size_bytes / rate if rate else 0.0

    def worthwhile_s(self, worker_id: str, tokens: int, reused_tokens: int, link_s: float) -> float:
        """The longest wait that makes reusing no slower than computing all `tokens`; 0: not known.

        Args:
            link_s: what moving the reused ones takes besides.
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
        """`seconds` of computation alone, without queue or transfers."""
        if new_tokens <= 0 or reused_tokens < 0:
            return
        fit = self._of_worker(self._prefill, worker_id, self._prefill_seed)
        fit.observe(_prefill_features(new_tokens, reused_tokens), seconds)

    def observe_tpot(
        self, worker_id: str, context_tokens: float, batch: float, seconds: float
    ) -> None:
        """A measured step; a worker's heartbeat holds all three."""
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
        tier: str = "dram",
    ) -> None:
        """A measured transfer. Time that a slow tier takes of itself is not held against the link."""
        if size_bytes <= 0:
            return
        rate = self.profile.tier_bytes_per_s.get(tier)
        link_s = seconds - (size_bytes / rate if rate else 0.0)
        fit = self._links.get((same_host, transport))
        if fit is None:
            fit = self._links[same_host, transport] = self._link_seed(same_host)
        fit.observe((1.0, size_bytes), link_s)

    def prefill_samples(self, worker_id: str) -> int:
        """How many prefills of this worker were learnt from; 0: predictions are the profile's."""
        fit = self._prefill.get(worker_id)
        return fit.observations if fit is not None else 0

    def tpot_samples(self, worker_id: str) -> int:
        """How many decode steps of this worker were learnt from."""
        fit = self._tpot.get(worker_id)
        return fit.observations if fit is not None else 0

    def forget_worker(self, worker_id: str) -> None:
        """Drop what was learnt of a worker that is gone."""
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
    """What a layer-wise send adds to the prefill: at least the last layer's transfer.

    Layers are equal; each is sent when it is final and when the one before it has left. A link slower than the
    prefill makes its whole backlog wait.
    """
    slowest_is_link = prefill_s / layers + transfer_s
    slowest_is_compute = prefill_s + transfer_s / layers
    return max(slowest_is_link, slowest_is_compute) - prefill_s
