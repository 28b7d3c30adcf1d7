"""One engine on the virtual clock: a queue of prompts and a batch of decoding sequences.

A prefill instance processes whole prompts one after another: it fetches, computes, and sends if
sends do not overlap the prefill. Any other instance runs in steps. While prompts wait, each step
computes a chunk of them and one token of every sequence (Sarathi-Serve). Otherwise steps only
decode, and many of them are computed at once in closed form. Times come from its cost profile.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from conductor.scheduling.cost_model import Profile
from planner.simulator.virtual_clock import EventLoop

MIN_CHUNK_TOKENS = 64  # so that prompts make progress beside a large batch


@dataclass(slots=True)
class Prompt:
    """Tokens to compute at an instance.

    Args:
        output_tokens: to decode here afterwards; 0: it decodes elsewhere.
        fetch: called when the instance begins with the prompt; may change `new` and `reused`;
            returns the time at which the reused KV has arrived.
        done: called when the prompt is computed, with the time at which computing began; returns
            the time until which the instance is busy with it.
        finished: called after the last token.
    """

    request_id: str
    new: int
    reused: int
    output_tokens: int
    done: Callable[[float], float]
    fetch: Callable[[], float] | None = None
    finished: Callable[[], None] | None = None
    computed: int = 0
    began: float = -1.0

    @property
    def context(self) -> int:
        return self.new + self.reused

    @property
    def left(self) -> int:
        return self.new - self.computed


@dataclass(slots=True, order=True)
class _Sequence:
    ends_at_step: int
    number: int
    context: int = 0
    reserved: int = 0
    finished: Callable[[], None] | None = None


class Instance:
    """An engine of one role.

    Args:
        kv_tokens: KV memory for running sequences.
    """

    def __init__(
        self,
        loop: EventLoop,
        worker_id: str,
        role: str,
        cost: Profile,
        kv_tokens: int,
        chunk_tokens: int,
        max_sequences: int,
    ) -> None:
        self.worker_id = worker_id
        self.role = role
        self.prefill_busy_s = 0.0
        self.decode_busy_s = 0.0
        self.context = 0  # tokens of KV of the sequences that decode
        self._loop = loop
        self._cost = cost
        self._kv_tokens = kv_tokens
        self._chunk_tokens = chunk_tokens
        self._max_sequences = max_sequences
        self._queue: deque[Prompt] = deque()
        self._batch: list[_Sequence] = []
        self._kv_used = 0
        self._steps = 0
        self._numbers = 0
        self._version = 0
        self._doing = ""  # "", "whole", "chunk", "steps", "edge"
        self._since = 0.0  # when the current steps began
        self._reserving: set[str] = set()

    # ------------------------------------------------------------ public

    @property
    def sequences(self) -> int:
        return len(self._batch)

    @property
    def running(self) -> int:
        return len(self._batch) + len(self._queue)

    @property
    def queued_tokens(self) -> int:
        """Tokens to compute, including the rest of the first prompt."""
        return sum(prompt.left for prompt in self._queue)

    def step_s(self) -> float:
        """Seconds of a decode step now."""
        return self._decode_s() if self._batch else 0.0

    def tpot_with(self, context: int) -> float:
        """Seconds of a decode step if one more sequence of `context` tokens joined."""
        return self._cost.tpot_s(self._now_context() + context, len(self._batch) + 1)

    def add(self, prompt: Prompt) -> None:
        """Queue a prompt."""
        self._queue.append(prompt)
        if not self._doing:
            self._begin()
        elif self._doing == "steps":
            self._interrupt()

    # ------------------------------------------------------------ inside

    def _begin(self) -> None:
        """Choose what to do next; called when nothing is under way."""
        self._doing = ""
        if self._queue and self.role == "prefill" and not self._batch:
            self._whole()
        elif self._queue and self._has_room(self._queue[0]):
            self._chunk()
        elif self._batch:
            self._decode()
        elif self._queue:
            self._chunk()  # larger than the instance: alone it may pass

    def _whole(self) -> None:
        self._doing = "whole"
        prompt = self._queue[0]
        if prompt.output_tokens:
            self._reserve(prompt)
        start = self._loop.now
        ready = prompt.fetch() if prompt.fetch is not None else start
        takes_s = self._cost.prefill_s(prompt.new, prompt.reused)
        prompt.began = ready

        def computed() -> None:
            prompt.computed = prompt.new
            free_at = prompt.done(ready)
            self.prefill_busy_s += max(free_at, self._loop.now) - start
            self._loop.at(free_at, finished)

        def finished() -> None:
            self._queue.popleft()
            self._joined(prompt)
            self._begin()

        self._loop.at(ready + takes_s, computed)

    def _chunk(self) -> None:
        """Run one step over a chunk of the waiting prompts and one token of each sequence."""
        self._doing = "chunk"
        c, batch = self._cost, len(self._batch)
        budget = self._chunk_tokens - batch if self._chunk_tokens else self._queue[0].left
        budget = max(budget, MIN_CHUNK_TOKENS)
        parts: list[tuple[Prompt, int]] = []
        attention = 0.0
        left, fetched = budget, self._loop.now
        for prompt in self._queue:
            if left <= 0 or (parts and not self._has_room(prompt)):
                break
            if prompt.began < 0:
                if prompt.fetch is not None:
                    fetched = max(fetched, prompt.fetch())
                prompt.began = fetched
            self._reserve(prompt)
            count = min(left, prompt.left)
            attention += count * (prompt.reused + prompt.computed + count / 2)
            parts.append((prompt, count))
            left -= count
        linear = c.prefill_base_s + c.prefill_token_s * (budget - left)
        takes_s = max(linear, c.tpot_base_s) + c.prefill_attention_s * attention
        if batch:
            takes_s += c.tpot_context_s * self.context + c.tpot_sequence_s * batch
        self.prefill_busy_s += takes_s
        takes_s += fetched - self._loop.now

        def stepped() -> None:
            self._advance(1)
            for prompt, count in parts:
                prompt.computed += count
            while self._queue and self._queue[0].left <= 0:
                prompt = self._queue.popleft()
                prompt.done(prompt.began)
                self._joined(prompt)
            self._begin()

        self._loop.at(self._loop.now + takes_s, stepped)

    def _decode(self) -> None:
        """Run steps until the first sequence ends, unless a prompt arrives before."""
        self._doing = "steps"
        self._since = self._loop.now
        self._version += 1
        version = self._version
        steps = max(1, self._batch[0].ends_at_step - self._steps)

        def ended() -> None:
            if version == self._version:
                self.decode_busy_s += self._loop.now - self._since
                self._advance(steps)
                self._begin()

        self._loop.at(self._since + self._steps_s(steps), ended)

    def _interrupt(self) -> None:
        """Stop decoding at the end of the current step, and choose the next work there."""
        steps = self._steps_until(self._loop.now)
        edge = self._since + self._steps_s(steps)
        self._version += 1
        self._doing = "edge"

        def at_edge() -> None:
            self.decode_busy_s += self._loop.now - self._since
            self._advance(steps)
            self._begin()

        self._loop.at(edge, at_edge)

    def _joined(self, prompt: Prompt) -> None:
        """Let a computed prompt decode, or leave if nothing is to be decoded here."""
        reserved = prompt.context + prompt.output_tokens
        is_reserved = prompt.request_id in self._reserving
        self._reserving.discard(prompt.request_id)
        if prompt.output_tokens <= 1:
            if is_reserved:
                self._kv_used -= reserved
            if prompt.finished is not None:
                prompt.finished()
            return
        self._numbers += 1
        ends = self._steps + prompt.output_tokens - 1  # the prefill gave the first token
        heapq.heappush(
            self._batch, _Sequence(ends, self._numbers, prompt.context, reserved, prompt.finished)
        )
        self.context += prompt.context

    def _advance(self, steps: int) -> None:
        """Add `steps` tokens to each sequence, and end those that are complete."""
        self._steps += steps
        self.context += steps * len(self._batch)
        while self._batch and self._batch[0].ends_at_step <= self._steps:
            sequence = heapq.heappop(self._batch)
            self._kv_used -= sequence.reserved
            # It held its prompt and all of its output except the last token.
            self.context -= sequence.reserved - 1
            if sequence.finished is not None:
                sequence.finished()
        if not self._batch:
            self.context = 0

    def _reserve(self, prompt: Prompt) -> None:
        if prompt.request_id not in self._reserving:
            self._reserving.add(prompt.request_id)
            self._kv_used += prompt.context + prompt.output_tokens

    def _has_room(self, prompt: Prompt) -> bool:
        if prompt.request_id in self._reserving:
            return True
        if len(self._batch) + len(self._reserving) >= self._max_sequences:
            return False
        return self._kv_used + prompt.context + prompt.output_tokens <= self._kv_tokens

    def _decode_s(self) -> float:
        return self._cost.tpot_s(self._now_context(), len(self._batch))

    def _now_context(self) -> float:
        if self._doing != "steps":
            return self.context
        return self.context + self._steps_until(self._loop.now) * len(self._batch)

    def _steps_s(self, steps: int) -> float:
        """Seconds of `steps` decode steps from `_since`: each reads one more token of every sequence."""
        batch = len(self._batch)
        first = self._cost.tpot_s(self.context, batch)
        return steps * first + self._cost.tpot_context_s * batch * steps * (steps - 1) / 2

    def _steps_until(self, now: float) -> int:
        """The number of steps that have begun by `now`."""
        elapsed = now - self._since
        batch = len(self._batch)
        first = self._cost.tpot_s(self.context, batch)
        slope = self._cost.tpot_context_s * batch / 2
        # slope * k^2 + (first - slope) * k = elapsed
        b = first - slope
        root = (-b + math.sqrt(b * b + 4 * slope * elapsed)) / (2 * slope) if slope else elapsed / b
        return max(1, math.ceil(root - 1e-9))
