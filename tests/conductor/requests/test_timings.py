"""How the figures of two workers become the phases of one request."""

from __future__ import annotations

import pytest

from conductor.requests.measurements import Measurements
from conductor.requests.reports import DecodeReport, PrefillReport


def prefilled(**reported: float) -> PrefillReport:
    return PrefillReport(64, 32, 1, reported, tokens_by_tier={"nvme": 64})


def generated(**reported: float) -> DecodeReport:
    return DecodeReport("stop", 96, 0, 4, phases=reported, tokens_by_tier={"dram": 96})


def test_seconds_of_two_workers_add_up_and_each_wait_has_its_name() -> None:
    result = Measurements(phases={"request_queue_wait": 1.0})
    result.add_prefill(
        prefilled(
            request_queue_wait=2.0,
            prefill_compute_time=4.0,
            kv_cache_transfer_time=8.0,
            kv_cache_transfer_exposed_time=0.5,
            kv_cache_send_time=3.0,
        ),
        seconds=6.0,
    )
    result.add_decode(
        generated(
            request_queue_wait=0.25,
            decode_queue_wait=0.5,
            prefill_compute_time=0.125,
            kv_cache_transfer_time=1.0,
            per_token_decode_time=0.1,
        )
    )
    assert result.phases["request_queue_wait"] == 3.0
    assert result.phases["decode_queue_wait"] == 0.75
    assert result.phases["prefill_compute_time"] == 4.125
    assert result.phases["kv_cache_transfer_time"] == 9.5  # what was sent meanwhile is in none
    # The decode worker read blocks that were computed for it: no hit.
    assert result.tokens_by_tier == {"nvme": 64}


def test_a_worker_that_prefills_for_itself_waits_as_a_prefill_does() -> None:
    result = Measurements()
    result.add_decode(generated(request_queue_wait=0.25, decode_queue_wait=0.5))
    assert result.phases == {"request_queue_wait": 0.25, "decode_queue_wait": 0.5}
    assert result.tokens_by_tier == {"dram": 96}


@pytest.mark.parametrize("times", [1, 2])
def test_a_second_attempt_adds_its_seconds_but_has_its_own_rate(times: int) -> None:
    result = Measurements()
    for at in range(times):
        result.add_decode(generated(prefill_compute_time=1.0, per_token_decode_time=float(at)))
    assert result.phases["prefill_compute_time"] == times
    assert result.tpot_s == result.phases["per_token_decode_time"] == times - 1
