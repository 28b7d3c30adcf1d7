"""Generates traces in Mooncake's format from a seed.

Kinds: `chat` (sessions of several turns behind one system prompt), `agents` (many short calls in a
row behind a few long shared prefixes), `documents` (questions on documents, whose popularity
follows Zipf's law), `scan` (prompts that never come again, between chats), `shift` (chat whose
habits change halfway), `mixed` (all at once).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush

from kvpool.errors import ConfigError
from planner.traces import MOONCAKE_BLOCK_TOKENS, TraceRequest


@dataclass(slots=True, order=True)
class _Turn:
    """A request to come."""

    time_s: float
    serial: int
    kind: str = field(compare=False)
    turns_left: int = field(compare=False)
    ids: list[int] = field(compare=False)  # full blocks; the turn before has them as well
    tail_tokens: int = field(compare=False)  # tokens of the last, partly filled block


class _Maker:
    def __init__(self, seed: int, rate_per_s: float) -> None:
        self.rng = random.Random(seed)
        self.rate_per_s = rate_per_s
        self.ids = 0
        self.serial = 0
        self.queue: list[_Turn] = []
        self.systems: dict[str, list[list[int]]] = {}
        self.is_shifted = False

    def fresh(self, count: int) -> list[int]:
        self.ids += count
        return list(range(self.ids - count, self.ids))

    def push(self, time_s: float, kind: str, turns: int, ids: list[int], tail: int) -> None:
        self.serial += 1
        heappush(self.queue, _Turn(time_s, self.serial, kind, turns, ids, tail))

    def shared(self, kind: str, count: int, blocks: int) -> list[list[int]]:
        """The prefixes that prompts of a kind share."""
        if kind not in self.systems:
            self.systems[kind] = [self.fresh(1 + self.rng.randrange(blocks)) for _ in range(count)]
        return self.systems[kind]

    def zipf(self, count: int) -> int:
        """A rank by Zipf's law."""
        return min(count - 1, int(count ** self.rng.random()) - 1)

    def begin(self, kind: str, now: float) -> None:
        """Start a session."""
        rng = self.rng
        if kind == "chat":
            longer = 2.0 if self.is_shifted else 1.0
            start = self.shared("chat-shifted" if self.is_shifted else "chat", 1, 2)[0]
            turns = 1 + int(rng.expovariate(1 / (2.0 / longer)))
            blocks = int(rng.lognormvariate(2.0, 1.1) * longer)
            self.push(now, kind, turns, start + self.fresh(blocks), rng.randrange(512))
        elif kind == "agents":
            prefixes = self.shared(kind, 24, 24)
            ids = prefixes[self.zipf(len(prefixes))] + self.fresh(rng.randrange(4))
            self.push(now, kind, 1 + int(rng.expovariate(1 / 8)), ids, rng.randrange(512))
        elif kind == "documents":
            documents = self.shared(kind, 400, 60)
            self.push(now, kind, 1, list(documents[self.zipf(400)]), rng.randrange(512))
        else:
            self.push(now, kind, 1, self.fresh(20 + rng.randrange(60)), rng.randrange(512))

    def follow(self, turn: _Turn, output: int) -> None:
        """Queue the next turn of a session, if there is one."""
        if turn.turns_left < 2:
            return
        rng = self.rng
        is_agent = turn.kind == "agents"
        gap_s = rng.lognormvariate(1.0, 0.7) if is_agent else rng.lognormvariate(4.5, 0.9)
        tokens = turn.tail_tokens + output + 1 + rng.randrange(300 if is_agent else 1500)
        ids = turn.ids + self.fresh(tokens // 512)
        self.push(turn.time_s + gap_s, turn.kind, turn.turns_left - 1, ids, tokens % 512)


_MIXES: dict[str, Callable[[random.Random], str]] = {
    "chat": lambda _: "chat",
    "agents": lambda _: "agents",
    "documents": lambda _: "documents",
    "scan": lambda rng: "chat" if rng.random() < 0.6 else "scan",
    "shift": lambda _: "chat",
    "mixed": lambda rng: rng.choice(("chat", "chat", "agents", "documents", "scan")),
}
KINDS = tuple(_MIXES)


def generate(
    kind: str, requests: int, *, seed: int = 0, sessions_per_s: float = 2.0
) -> Iterator[TraceRequest]:
    """Requests of a kind in the order of time, with blocks of 512 tokens.

    Raises:
        ConfigError: the kind is unknown, or a number is not positive.
    """
    if kind not in _MIXES:
        raise ConfigError(f"unknown kind of trace {kind!r}", hint=f"use {', '.join(KINDS)}")
    if requests < 1 or not sessions_per_s > 0:
        raise ConfigError(
            f"cannot generate {requests} requests from {sessions_per_s} sessions per second",
            hint="both must be positive",
        )
    return _requests(kind, requests, _Maker(seed, sessions_per_s))


def _requests(kind: str, requests: int, maker: _Maker) -> Iterator[TraceRequest]:
    rng = maker.rng
    next_session_s = 0.0
    made = 0
    while made < requests:
        if not maker.queue or maker.queue[0].time_s >= next_session_s:
            maker.begin(_MIXES[kind](rng), next_session_s)
            next_session_s += rng.expovariate(maker.rate_per_s)
            continue
        turn = heappop(maker.queue)
        output = 1 + int(rng.lognormvariate(4.0 if turn.kind == "agents" else 5.5, 0.8))
        ids = turn.ids + maker.fresh(1 if turn.tail_tokens else 0)
        tokens = len(turn.ids) * MOONCAKE_BLOCK_TOKENS + turn.tail_tokens
        yield TraceRequest(round(turn.time_s, 3), tokens, output, ids)
        maker.follow(turn, output)
        made += 1
        maker.is_shifted = kind == "shift" and made > requests // 2
