"""The cost model: it learns what is measured, follows changes, ignores outliers, stays positive."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conductor.scheduling.cost_model import CostModel, LinkProfile, OnlineFit, Profile
from kvpool.blocks.tier import Tier
from kvpool.errors import InvalidArgument
from tests.support.sizes import examples

PROBES = [(64, 0), (1024, 0), (4096, 1024), (16_000, 0), (512, 8192)]


def true_prefill_s(new: int, reused: int) -> float:
    """A worker ten times as fast as the default profile, with another balance of the two terms."""
    return 0.02 + 1e-4 * new + 3e-8 * new * (reused + new / 2)


def teach(model: CostModel, rounds: int, outliers: float, seed: int = 1) -> None:
    rng = random.Random(seed)
    for _ in range(rounds):
        new, reused = rng.choice([64, 256, 1024, 4096, 16_000]), rng.choice([0, 0, 1024, 8192])
        seconds = true_prefill_s(new, reused) * rng.gauss(1.0, 0.05)
        if rng.random() < outliers:
            seconds *= 20
        model.observe_prefill("w", new, reused, seconds)


def test_prefill_follows_the_documented_formula_before_any_measurement() -> None:
    p = Profile()
    expected = (
        p.prefill_base_s + p.prefill_token_s * 100 + p.prefill_attention_s * 100 * (1000 + 50)
    )
    assert CostModel(p).prefill_s("w", 100, 1000) == pytest.approx(expected)
    assert CostModel(p).prefill_s("w", 0, 1000) == 0.0


def test_default_profile_is_near_the_measured_small_model() -> None:
    model = CostModel()
    assert 1024 / model.prefill_s("w", 1024) == pytest.approx(735, rel=0.1)
    assert 4096 / model.prefill_s("w", 4096) == pytest.approx(515, rel=0.1)


@pytest.mark.parametrize("outliers", [0.0, 0.05])
def test_prefill_fit_reaches_the_true_worker(outliers: float) -> None:
    model = CostModel()
    teach(model, 300, outliers)
    for new, reused in PROBES:
        assert model.prefill_s("w", new, reused) == pytest.approx(
            true_prefill_s(new, reused), rel=0.12
        )


def test_one_outlier_moves_a_settled_fit_little() -> None:
    model = CostModel()
    teach(model, 200, 0.0)
    before = model.prefill_s("w", 1024)
    model.observe_prefill("w", 1024, 0, 1000.0)
    assert model.prefill_s("w", 1024) == pytest.approx(before, rel=0.05)


def test_a_lasting_change_is_followed_even_under_a_constant_load() -> None:
    model = CostModel()
    for seconds in (20.0, 0.5):
        for _ in range(40):
            model.observe_prefill("w", 1024, 0, seconds)
        assert model.prefill_s("w", 1024) == pytest.approx(seconds, rel=0.15)


def test_workers_learn_apart_and_are_forgotten() -> None:
    model = CostModel()
    seed_s = model.prefill_s("other", 1024)
    teach(model, 50, 0.0)
    assert model.prefill_s("other", 1024) == seed_s
    assert model.prefill_s("w", 1024) < seed_s / 5
    assert (model.prefill_samples("w"), model.prefill_samples("other")) == (50, 0)
    model.forget_worker("w")
    assert model.prefill_s("w", 1024) == seed_s


def test_tpot_fit_separates_context_from_batch() -> None:
    model, rng = CostModel(), random.Random(2)
    for _ in range(300):
        batch = rng.randint(1, 32)
        context = batch * rng.randint(100, 8000)
        model.observe_tpot("w", context, batch, 0.005 + 1e-7 * context + 4e-4 * batch)
    for context, batch in [(1000, 1), (100_000, 20), (10_000, 30)]:
        expected = 0.005 + 1e-7 * context + 4e-4 * batch
        assert model.tpot_s("w", context, batch) == pytest.approx(expected, rel=0.1)


def test_links_learn_apart_by_locality_and_transport() -> None:
    model = CostModel()
    for _ in range(100):
        for size in (10_000, 1_000_000, 100_000_000):
            model.observe_transfer(size, 1e-4 + size / 20e9, same_host=False, transport="rdma")
    fast = model.transfer_s(1e9, same_host=False, transport="rdma")
    assert fast == pytest.approx(0.05, rel=0.1)
    assert model.transfer_s(1e9, same_host=False) == pytest.approx(0.002 + 1e9 / 1.1e9)
    assert model.transfer_s(1e9, same_host=True) < model.transfer_s(1e9, same_host=False)
    assert model.transfer_s(0, same_host=False) == 0.0


def test_a_slow_tier_costs_its_own_reading_and_does_not_spoil_the_link() -> None:
    model = CostModel()
    dram_s = model.transfer_s(1e9, same_host=True)
    assert model.transfer_s(1e9, same_host=True, tier=Tier.NVME) == pytest.approx(dram_s + 1 / 2.5)
    for _ in range(50):
        model.observe_transfer(1e9, dram_s + 1 / 2.5, same_host=True, tier=Tier.NVME)
    assert model.transfer_s(1e9, same_host=True) == pytest.approx(dram_s, rel=0.02)


def test_a_measured_disk_outweighs_the_profiles() -> None:
    model = CostModel()
    assert model.tier_s(1e9, Tier.NVME) == pytest.approx(1 / 2.5)
    assert model.tier_s(1e9, Tier.NVME, 5e7) == pytest.approx(20.0)
    assert model.tier_s(1e9, Tier.DRAM) == 0.0


def test_a_wait_is_worth_the_measured_time_of_computing() -> None:
    model = CostModel()
    # No limit: this worker was not measured.
    assert model.worthwhile_s("w", 1000, 900, 0.0) == 0.0
    for _ in range(20):
        model.observe_prefill("w", 1000, 0, 2.0)
        model.observe_prefill("w", 100, 900, 0.3)
    worth_s = model.worthwhile_s("w", 1000, 900, 0.0)
    assert worth_s == pytest.approx(1.7, rel=0.15)
    assert model.worthwhile_s("w", 1000, 900, 0.5) == pytest.approx(worth_s - 0.5)
    assert 0 < model.worthwhile_s("w", 1000, 900, 99.0) < 0.01  # never 0, which would be no limit
    assert model.worthwhile_s("w", 1000, 0, 0.0) == 0.0


def test_a_queue_is_priced_by_the_workers_own_rate_when_it_has_one() -> None:
    model = CostModel()
    assert model.queue_s("w", 5000, tokens_per_s=1000) == 5.0
    assert model.queue_s("w", 0) == 0.0
    linear = model.queue_s("w", 100_000)
    assert linear == pytest.approx(100_000 / 1024 * model.prefill_s("w", 1024))


finite = st.floats(allow_nan=True, allow_infinity=True)


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.tuples(st.integers(-5, 10**7), st.integers(-5, 10**7), finite), max_size=30))
def test_predictions_are_positive_and_finite_whatever_was_measured(
    measured: list[tuple[int, int, float]],
) -> None:
    model = CostModel()
    for new, reused, seconds in measured:
        model.observe_prefill("w", new, reused, seconds)
        model.observe_tpot("w", new, reused, seconds)
        model.observe_transfer(new, seconds, same_host=True)
    for predicted in (
        model.prefill_s("w", 100, 1000),
        model.tpot_s("w", 1000, 4),
        model.transfer_s(1e6, same_host=True),
    ):
        assert 0 < predicted < float("inf")


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_invalid_measurements_are_ignored(seconds: float) -> None:
    fit = OnlineFit((1.0, 1.0))
    fit.observe((1.0, 2.0), seconds)
    assert (fit.observations, fit.coefficients) == (0, (1.0, 1.0))


def test_fits_are_bounded_in_number() -> None:
    model = CostModel(max_workers=2)
    for worker in ("a", "b", "c"):
        model.observe_prefill(worker, 100, 0, 1.0)
    assert [model.prefill_samples(w) for w in ("a", "b", "c")] == [0, 1, 1]


def test_a_profile_with_a_figure_that_is_not_positive_is_refused() -> None:
    with pytest.raises(InvalidArgument):
        Profile(tpot_base_s=0.0)
    with pytest.raises(InvalidArgument):
        Profile(same_host=LinkProfile(1e-3, float("inf")))
