"""One simulated engine: its closed forms agree with single steps, and its limits are kept."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conductor.scheduling.cost_model import Profile
from planner.simulator.instance import Instance, Prompt
from planner.simulator.virtual_clock import EventLoop
from tests.support.sizes import examples

COST = Profile(
    prefill_base_s=1e-9,
    prefill_token_s=1e-3,
    prefill_attention_s=1e-12,
    tpot_base_s=0.01,
    tpot_context_s=1e-6,
    tpot_sequence_s=0.001,
)


class Run:
    """An instance, and when its prompts were computed and finished."""

    def __init__(self, role: str = "decode", kv: int = 1 << 40, chunk: int = 512, most: int = 256):
        self.loop = EventLoop()
        self.instance = Instance(self.loop, "w", role, COST, kv, chunk, most)
        self.first: dict[str, float] = {}
        self.ended: dict[str, float] = {}

    def add(self, name: str, at: float, new: int, output: int, reused: int = 0) -> None:
        def done(_: float) -> float:
            self.first[name] = self.loop.now
            return self.loop.now

        def finished() -> None:
            self.ended[name] = self.loop.now

        prompt = Prompt(name, new, reused, output, done, finished=finished)
        self.loop.at(at, lambda: self.instance.add(prompt))

    def run(self) -> None:
        self.loop.run(lambda: False)


def test_a_sequence_alone_takes_a_step_for_each_token_after_the_first() -> None:
    run = Run()
    run.add("a", 0.0, 100, 11, reused=900)
    run.run()
    steps = [0.01 + 0.001 + 1e-6 * (1000 + k) for k in range(10)]
    assert run.ended["a"] - run.first["a"] == pytest.approx(sum(steps), rel=1e-9)
    assert run.instance.context == 0
    assert run.instance.sequences == 0


def test_a_prompt_waits_for_the_end_of_the_current_step_and_slows_the_others() -> None:
    run = Run(chunk=512)
    run.add("a", 0.0, 10, 100)
    run.run()
    alone = run.ended["a"]
    run = Run(chunk=512)
    run.add("a", 0.0, 10, 100)
    run.add("b", 0.5, 1000, 2)
    run.run()
    assert run.ended["a"] > alone
    # 1,000 tokens beside one sequence: chunks of 511 and 489.
    assert run.first["b"] == pytest.approx(0.5 + 1.0, abs=0.05)


def test_chunks_keep_decodes_going_where_whole_prompts_stall_them() -> None:
    longest = {}
    for chunk in (128, 0):
        run = Run(chunk=chunk)
        run.add("a", 0.0, 10, 50)
        run.add("b", 0.1, 4000, 2)
        run.run()
        longest[chunk] = run.ended["a"]
    assert longest[128] > longest[0] - 4.0  # both include the 4 s of computing,
    run = Run(chunk=128)
    run.add("a", 0.0, 10, 5)
    run.add("b", 0.02, 4000, 2)
    run.run()
    chunked = run.ended["a"]
    run = Run(chunk=0)
    run.add("a", 0.0, 10, 5)
    run.add("b", 0.02, 4000, 2)
    run.run()
    assert chunked < 1.0 < 4.0 < run.ended["a"]  # but one that is nearly done need not wait for all


def test_a_prefill_instance_takes_whole_prompts_in_order_and_is_busy_until_they_are_sent() -> None:
    loop = EventLoop()
    instance = Instance(loop, "w", "prefill", COST, 1 << 40, 512, 256)
    ends = []

    def done(_: float) -> float:
        ends.append(loop.now)
        return loop.now + 0.5  # the send is not overlapped

    for name in "ab":
        instance.add(Prompt(name, 1000, 0, 0, done, fetch=lambda: loop.now + 0.25))
    loop.run(lambda: False)
    assert ends == pytest.approx([1.25, 1.25 + 0.5 + 1.25], rel=1e-6)
    assert instance.running == 0


def test_no_more_kv_is_taken_than_there_is() -> None:
    run = Run(kv=1000)
    run.add("a", 0.0, 500, 100)
    run.add("b", 0.0, 500, 100)
    run.run()
    assert run.first["b"] >= run.ended["a"]
    run = Run(most=1)
    run.add("a", 0.0, 50, 100)
    run.add("b", 0.0, 50, 100)
    run.run()
    assert run.first["b"] >= run.ended["a"]


requests = st.lists(
    st.tuples(st.floats(0, 2), st.integers(1, 2000), st.integers(1, 60), st.integers(0, 2000)),
    min_size=1,
    max_size=12,
)


@settings(max_examples=examples(150), deadline=None)
@given(requests, st.sampled_from([0, 64, 512]), st.sampled_from([3000, 1 << 40]), st.integers(1, 9))
def test_every_prompt_ends_and_nothing_is_left_behind(
    wanted: list[Any], chunk: int, kv: int, most: int
) -> None:
    run = Run(chunk=chunk, kv=kv, most=most)
    for number, (at, new, output, reused) in enumerate(wanted):
        run.add(str(number), at, new, output, reused)
    run.run()
    assert set(run.ended) == set(run.first) == {str(n) for n in range(len(wanted))}
    for number, (at, _, output, _) in enumerate(wanted):
        name = str(number)
        assert at < run.first[name] <= run.ended[name]
        least = (output - 1) * COST.tpot_base_s
        assert run.ended[name] - run.first[name] >= least * (1 - 1e-9)
    instance = run.instance
    assert (instance.context, instance.sequences, instance.running) == (0, 0, 0)
    assert instance._kv_used == 0
