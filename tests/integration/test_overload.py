"""More requests than can be served: refusing early serves more of them within their objectives. Engines sleep."""

from __future__ import annotations

from benchmarks.scheduler import overload
from benchmarks.traffic import steady


def test_under_overload_early_rejection_serves_more_within_the_objectives() -> None:
    # 1,200 tokens take a worker 0.4 s, and 8 a second come to two of them: almost twice what they can do.
    requests = steady(8, 4.0, 1200, 4)
    found = overload(requests, (), (2.5, 1.0), prefill=1, decode=1, hosts=("h0",))
    refusing, late = found["with_rejection"], found["without"]
    assert refusing["failed"] == late["failed"] == 0
    assert refusing["rejected"] > 0
    assert late["rejected"] == 0
    assert refusing["good"] > late["good"]
    assert refusing["goodput_per_s"] > late["goodput_per_s"]
    assert refusing["mean_ttft_s"] < late["mean_ttft_s"]
