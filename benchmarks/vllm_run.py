"""What `kvpool bench vllm` measures: TTFT of one prompt at a time, in one run, by four ways to get its KV.

- Computing everything is measured in a vLLM without a connector.
- A hit in the pool is measured in a process that has not computed the prompt, so that all of it
  must come from the pool. Peers are measured in the same way.
- vLLM's own hit is measured in that same process, with the pool left out, because equal processes
  differ by up to a tenth, depending on where their memory is. The own hit of the vLLM without a
  connector is reported beside it.

Hits are measured in turns, also those of the pool and of each peer, so that other work on the
machine affects all of them. Peers are measured one after another, since they would not fit into
memory together. Prompts end half a page after a whole number of pages. This half is always
computed, as in an average prompt, and it splits every hit at the same token; otherwise bf16 gives
other numbers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.vllm_backends import PEERS, Backend, Open, kvpool
from benchmarks.vllm_engine import BenchEngine, EngineFailed
from kvpool.errors import KvpoolError

PAGE_TOKENS = 128  # vLLM's on CPU
TAIL_TOKENS = PAGE_TOKENS // 2
WARM_TOKENS = 2 * PAGE_TOKENS + TAIL_TOKENS
FIRST_TOKEN, LAST_TOKEN = 1000, 40_000  # ordinary tokens in every vocabulary that is used here
SETTLE_S = 2.0  # after this long without a save, all are over
IDLE_S = 1.5  # vLLM's processes spin for 1 s after their last message, which would slow the next one down
MAX_ASKED = 3
SAVING_ROUNDS = 6
SAVING_PROMPTS = 2  # per round and side

Say = Callable[[str], None]


@dataclass(slots=True)
class Order:
    """What to measure.

    Args:
        sizes: prompt lengths in tokens, multiples of 128; `TAIL_TOKENS` are added to each.
        repeats: prompts of each size; results are medians.
        saving_tokens: prompt length to measure the cost of saving; 0: it is not measured.
    """

    model: Path
    sizes: Sequence[int]
    repeats: int
    peers: Sequence[str]
    saving_tokens: int
    cache_gib: int = 1
    store_bytes: int = 2 << 30
    env: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True, frozen=True)
class _Rival:
    """A store under measurement: the process that stores, and the one that reads."""

    backend: Backend
    writer: BenchEngine
    reader: BenchEngine

    def ready(self) -> None:
        """Wait until both serve."""
        self.writer.ready()
        if self.reader is not self.writer:
            self.reader.ready()

    def hit(self, prompt: Sequence[int], size: int) -> dict[str, Any]:
        """Serve a prompt whose first `size` tokens must come from the store, and nothing from vLLM's own cache.

        If the store misses, it is asked again, and the miss is counted.

        Raises:
            EngineFailed: the store missed every time.
        """
        for misses in range(MAX_ASKED):
            self.reader.forget()
            hit = _alone(self.reader, prompt)
            if hit["external"] == size and not hit["local"]:
                return {**hit, "asked_before": misses}
        counted = {name: value for name, value in hit.items() if value and isinstance(value, int)}
        raise EngineFailed(f"of {size} tokens the store gave {hit['external']}: {counted}")


@dataclass(slots=True)
class _Size:
    """The measurements of prompts of one length."""

    tokens: int  # whole pages
    prompts: list[list[int]]
    recomputed: list[dict[str, Any]] = field(default_factory=list)
    local: list[dict[str, Any]] = field(default_factory=list)
    plain_local: list[dict[str, Any]] = field(default_factory=list)
    pool: list[dict[str, Any]] = field(default_factory=list)
    peers: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def hit_both(self, pool: _Rival, prompt: Sequence[int]) -> None:
        """Serve a prompt from the pool, then in the same process from vLLM's own cache."""
        self.pool.append(pool.hit(prompt, self.tokens))
        self.local.append(_alone(pool.reader, prompt, may_load=False))

    def row(self) -> dict[str, Any]:
        """As JSON values."""
        first = len(self.prompts)
        return {
            "prompt_tokens": self.tokens + TAIL_TOKENS,
            "recompute_ttft_s": _median(self.recomputed),
            "pool_ttft_s": _median(self.pool),
            "local_prefix_hit_ttft_s": _median(self.local),
            "local_prefix_hit_without_connector_ttft_s": _median(self.plain_local),
            "peers": {name: _median(hits) for name, hits in self.peers.items()},
            "outputs_equal": all(
                [h["output"] for h in hits[:first]] == [h["output"] for h in self.plain_local]
                for hits in (self.pool, self.local)
            ),
            "hit_tokens": self.tokens,
            "tokens_from_pool": min(hit["loaded_tokens"] for hit in self.pool),
            "pool_misses": sum(hit["asked_before"] for hit in self.pool),
            "tokens_from_local_cache": min(hit["local"] for hit in self.local + self.plain_local),
        }


class Bench:
    """One run. Its processes live no longer than `run`."""

    def __init__(self, order: Order, directory: Path, say: Say) -> None:
        self._order = order
        self._directory = directory
        self._say = say
        self._rng = np.random.default_rng(20_25)
        self._sizes = [
            _Size(tokens, [self._prompt(tokens + TAIL_TOKENS) for _ in range(order.repeats)])
            for tokens in order.sizes
        ]
        self._warm_up = self._prompt(WARM_TOKENS)

    def run(self) -> dict[str, Any]:
        """Measure a row for each length and the cost of saving; say why a peer was not measured.

        Raises:
            EngineFailed: vLLM does not run here, or the pool did not return what was stored.
        """
        saving = None
        reasons: dict[str, str] = {}
        with ExitStack() as stack:
            plain = self._engine(stack, "plain", None)
            with ExitStack() as writing:
                pool = self._open(stack, "kvpool", kvpool, writing)
                plain.ready()
                self._warm(pool)
                for _ in range(2):
                    plain.generate(self._warm_up)
                if self._order.saving_tokens:
                    saving = self._saving(pool.writer)
                for size in self._sizes:
                    self._measure(size, plain, pool)
            for name in self._order.peers:
                self._say(f"beside {name}")
                try:
                    with ExitStack() as theirs:
                        peer = self._open(theirs, name, PEERS[name], theirs)
                        self._warm(peer)
                        for size in self._sizes:
                            self._measure_peer(size, name, pool, peer)
                except KvpoolError as error:  # a peer that fails must not lose the other figures
                    reasons[name] = str(error)
                    for size in self._sizes:
                        size.peers.pop(name, None)
        rows = [size.row() for size in self._sizes]
        return {"rows": rows, "saving": saving, "not_measured": reasons}

    # ------------------------------------------------------------ processes

    def _engine(self, stack: ExitStack, name: str, backend: Backend | None) -> BenchEngine:
        env = self._order.env | (backend.env if backend else {})
        log = self._directory / f"{name}.log"
        transfer = backend.transfer if backend else None
        return stack.enter_context(
            BenchEngine(self._order.model, transfer, log, cache_gib=self._order.cache_gib, env=env)
        )

    def _open(self, stack: ExitStack, name: str, open_: Open, writing: ExitStack) -> _Rival:
        """Start a store and its two vLLM processes. The one that stores ends with `writing`."""
        directory = self._directory / name
        directory.mkdir()
        backend = stack.enter_context(open_(directory, self._order.store_bytes))
        writer = self._engine(writing, f"{name}-writer", backend)
        if not backend.is_shared:
            return _Rival(backend, writer, writer)
        finds = replace(backend, transfer=backend.transfer | {"kv_role": backend.reader_role})
        reader = self._engine(stack, f"{name}-reader", finds)
        return _Rival(backend, writer, reader)

    # ------------------------------------------------------------ measuring

    def _prompt(self, tokens: int) -> list[int]:
        return [int(token) for token in self._rng.integers(FIRST_TOKEN, LAST_TOKEN, tokens)]

    def _warm(self, rival: _Rival) -> None:
        """Serve one miss and one hit, so that costs at first use are not measured."""
        rival.ready()
        rival.writer.generate(self._warm_up)
        time.sleep(SETTLE_S)
        rival.hit(self._warm_up, WARM_TOKENS - TAIL_TOKENS)

    def _measure(self, size: _Size, plain: BenchEngine, pool: _Rival) -> None:
        self._say(f"{size.tokens + TAIL_TOKENS} tokens")
        size.recomputed = [_alone(plain, prompt) for prompt in size.prompts]
        pool.writer.prefill(size.prompts)
        time.sleep(SETTLE_S)
        for prompt in size.prompts:
            size.plain_local.append(_alone(plain, prompt))
            size.hit_both(pool, prompt)

    def _measure_peer(self, size: _Size, name: str, pool: _Rival, peer: _Rival) -> None:
        peer.writer.prefill(size.prompts)
        time.sleep(SETTLE_S)
        for prompt in size.prompts:
            size.peers.setdefault(name, []).append(peer.hit(prompt, size.tokens))
            size.hit_both(pool, prompt)

    def _saving(self, writer: BenchEngine) -> dict[str, Any]:
        """Prefills one after another, saved and not saved, in turns: A B B A.

        In one process, because equal processes differ by up to a tenth.
        """
        size = self._order.saving_tokens + TAIL_TOKENS
        self._say(f"cost of saving, {size} tokens")
        ratios = []
        for _ in range(SAVING_ROUNDS):
            seconds: dict[bool, float] = {True: 0.0, False: 0.0}
            for is_saved in (False, True, True, False):
                time.sleep(SETTLE_S)  # the last save must not slow the other side down
                prompts = [self._prompt(size) for _ in range(SAVING_PROMPTS)]
                seconds[is_saved] += writer.prefill(prompts, is_saved=is_saved)
            ratios.append(seconds[True] / seconds[False])
        ordered = sorted(ratios)
        return {
            "prompt_tokens": size,
            "prefill_time_ratio": round(median(ratios), 4),
            "lowest": round(ordered[0], 4),
            "highest": round(ordered[-1], 4),
        }


def _alone(engine: BenchEngine, prompt: Sequence[int], *, may_load: bool = True) -> dict[str, Any]:
    """Serve a prompt while no other process computes."""
    time.sleep(IDLE_S)
    return engine.generate(prompt, may_load=may_load)


def _median(results: Sequence[dict[str, Any]]) -> float:
    return round(float(median(result["ttft_s"] for result in results)), 5)
