"""Two gateways of one pool under load: one is killed, or Redis is. OpenAI's client, real processes, engines that sleep."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.node_pair import Pair, running_pair
from tests.support.process_cluster import wait_until

ENGINE = (
    "worker.model_name=fake",
    "worker.block_tokens=32",
    "worker.max_concurrent=64",
    "fake_engine.bytes_per_token=1024",
    "fake_engine.prefill_token_s=0.0002",
    "fake_engine.tpot_base_s=0.01",
)
ROLES = ("prefill", "decode", "decode")
CALLERS, OUTPUT = 6, 12
# What a client sees of a gateway that is gone: try the next address.
GONE = (openai.APIConnectionError, openai.InternalServerError)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with running_pair(tmp_path, "conductor.advanced.min_remote_prefill_tokens=64") as running:
        for name in ("n0", "n1"):
            running.start_node(name, "node.advanced.quarantine_s=1", "node.advanced.grace_s=0.2")
        for number, role in enumerate(ROLES):
            running.launch_fake_worker(f"w{number}", role, *ENGINE)
        for number in range(len(ROLES)):
            running.ready_worker(f"w{number}")
        for name in "ab":
            running.wait_live(name, 2)
            wait_until(lambda name=name: _live_workers(running, name) == len(ROLES), "workers")
        yield running


def _live_workers(pair: Pair, name: str) -> int:
    return sum(worker["state"] == "live" for worker in pair.stats_of(name)["workers"])


@dataclass
class Traffic:
    """Callers that ask one prompt after the other until told to stop, each with both addresses."""

    pair: Pair
    order: str  # names of the conductors, in which every caller tries them
    answers: dict[int, tuple[int, ...]] = field(default_factory=dict)  # by seed of the prompt
    served_by: list[str] = field(default_factory=list)
    failures: list[tuple[str, str]] = field(default_factory=list)  # (conductor, error)
    cached_tokens: int = 0
    is_over: bool = False

    async def caller(self, number: int) -> None:
        """Alternates between streams and whole answers, and between its first and its second address."""
        clients = {
            name: openai.AsyncOpenAI(
                base_url=f"http://{self.pair.facts[name]['http']}/v1",
                api_key="unused",
                max_retries=0,
                timeout=30,
            )
            for name in self.order
        }
        turn = number
        while not self.is_over:
            turn += 1
            seed = turn % 8  # some prompts come again, and are found in the pool
            names = self.order if turn % 2 else self.order[::-1]
            for name in names:
                try:
                    ids = await self._ask(clients[name], seed, is_streamed=turn % 3 == 0)
                except GONE as error:
                    self.failures.append((name, type(error).__name__))
                    continue
                assert self.answers.setdefault(seed, ids) == ids, "equal prompts, other answers"
                assert len(ids) == OUTPUT
                self.served_by.append(name)
                break
            else:
                raise AssertionError(f"no gateway answered: {self.failures[-2:]}")
        for client in clients.values():
            await client.close()

    async def _ask(
        self, client: openai.AsyncOpenAI, seed: int, *, is_streamed: bool
    ) -> tuple[int, ...]:
        ask: Any = {
            "model": "fake",
            "prompt": [(seed * 7919 + 31 * at) % 50_000 for at in range(300)],
            "max_tokens": OUTPUT,
            "temperature": 0,
            "extra_body": {"kvpool": {"return_token_ids": True}},
        }
        if not is_streamed:
            answer = await client.completions.create(**ask)
            details = answer.usage.prompt_tokens_details if answer.usage else None
            self.cached_tokens += (details.cached_tokens or 0) if details else 0
            return tuple(answer.model_extra["kvpool"]["token_ids"])
        report: dict[str, Any] = {}
        async with await client.completions.create(stream=True, **ask) as events:
            async for event in events:
                report = (event.model_extra or {}).get("kvpool") or report
        if not report:  # the stream ended before its end
            raise openai.APIConnectionError(message="cut off", request=events.response.request)
        return tuple(report["token_ids"])

    async def until(self, claim: Callable[[], Any], what: str, timeout_s: float = 20.0) -> None:
        """Wait while the callers go on; whatever one of them raises ends the test."""
        deadline = time.monotonic() + timeout_s
        while not claim():
            for task in self.tasks:
                if task.done():
                    task.result()
            assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
            await asyncio.sleep(0.02)

    async def __aenter__(self) -> Traffic:
        self.tasks = [asyncio.create_task(self.caller(number)) for number in range(CALLERS)]
        return self

    async def __aexit__(self, *_: Any) -> None:
        self.is_over = True
        await asyncio.gather(*self.tasks)


@pytest.mark.parametrize("victim", ["a", "b"])
async def test_a_killed_gateway_costs_no_request_that_was_not_on_it_and_its_own_are_asked_again(
    pair: Pair, victim: str
) -> None:
    survivor = "b" if victim == "a" else "a"
    async with Traffic(pair, "ab") as traffic:
        await traffic.until(lambda: len(traffic.served_by) > 40, "requests are served")
        assert set(traffic.served_by) == {"a", "b"}
        assert traffic.failures == []
        await asyncio.to_thread(pair.signal, victim, signal.SIGKILL)
        before = len(traffic.served_by)
        await traffic.until(lambda: len(traffic.served_by) > before + 60, "the other one serves")
    # Clients of the dead one asked the other; the rest were served at the first try.
    assert {name for name, _ in traffic.failures} == {victim}
    assert traffic.served_by[-20:] == [survivor] * 20
    assert traffic.cached_tokens > 0
    assert pair.states(survivor) == ["live", "live"]
    stats = pair.stats_of(survivor)
    assert not [name for name in stats["counters"] if name.startswith("failed:")], stats["counters"]
    assert stats["counters"].get("requests:cancelled", 0) == 0
    assert _live_workers(pair, survivor) == len(ROLES)
    # Nothing of the dead one's requests is held, by workers or by nodes.
    wait_until(
        lambda: all(w["load"]["running"] == 0 for w in pair.stats_of(survivor)["workers"]),
        "its requests end at the workers",
    )
    for name in ("n0", "n1"):
        wait_until(lambda name=name: pair.is_settled(name), "its slots and leases are given back")


async def test_without_redis_both_gateways_go_on_and_reuse_again_when_it_is_back(
    pair: Pair,
) -> None:
    async with Traffic(pair, "ab") as traffic:

        async def some_more(count: int) -> None:
            before = len(traffic.served_by)
            await traffic.until(lambda: len(traffic.served_by) > before + count, "served")
            assert set(traffic.served_by[before:]) == {"a", "b"}

        def notices() -> list[str]:
            return [pair.stats_of(name)["notice"] for name in "ab"]

        await some_more(20)
        pair.stop_redis()
        await some_more(30)
        await traffic.until(lambda: all(notices()), "both say so")
        await some_more(30)
        await asyncio.to_thread(pair.restart_redis)
        await traffic.until(lambda: not any(notices()), "both recover")
        await some_more(20)
        traffic.cached_tokens = 0
        await traffic.until(lambda: traffic.cached_tokens > 1000, "blocks are found again")
    assert traffic.failures == []
    for name in "ab":
        assert pair.states(name) == ["live", "live"]
        assert _live_workers(pair, name) == len(ROLES)
