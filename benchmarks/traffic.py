"""Requests for benchmarks through the gateway: from a trace or synthetic, sent at their times, with what a client saw.

It uses OpenAI's HTTP API and nothing else of kvpool, so any client would measure the same.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from planner.traces import MOONCAKE_BLOCK_TOKENS, TraceRequest, load_requests

SHRINK = 8  # a block of the trace has 512 tokens, and 64 here
BLOCK_TOKENS = 64
MODEL = "fake"
REFUSED = ("http 429", "http 503")


@dataclass(slots=True, frozen=True)
class Request:
    """One request of a trace, scaled."""

    at_s: float
    tokens: list[int]
    output_tokens: int


@dataclass(slots=True)
class Measured:
    """One request as the client saw it."""

    status: str
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0


def read_trace(path: Path, skip: int, count: int, seconds: float) -> list[Request]:
    """`count` requests of a trace file after the first `skip`, spread over `seconds`."""
    requests, _ = load_requests(str(path), is_strict=True, limit=skip + count)
    return scaled(requests[skip:], seconds)


def synthetic(count: int, seconds: float, seed: int = 1) -> list[Request]:
    """Conversations of a few turns over some shared system prompts."""
    chance = random.Random(seed)
    requests: list[TraceRequest] = []
    next_id = 100
    open_chats: list[list[int]] = []
    for number in range(count):
        if open_chats and chance.random() < 0.6:
            ids = open_chats.pop(chance.randrange(len(open_chats)))
        else:
            ids = list(range(10 * chance.randrange(4), 10 * chance.randrange(4) + 4))
        grown = [*ids, *range(next_id, next_id + chance.randint(2, 14))]
        next_id = grown[-1] + 1
        length = MOONCAKE_BLOCK_TOKENS * len(grown) - chance.randrange(500)
        requests.append(TraceRequest(number * 0.1, length, chance.randint(30, 600), grown))
        open_chats.append(grown)
    return scaled(requests, seconds)


def scaled(traced: Sequence[TraceRequest], seconds: float) -> list[Request]:
    """Requests of a trace with token ids, over `seconds`."""
    first_s = traced[0].time_s
    span_s = max(1e-3, traced[-1].time_s - first_s)
    requests = []
    for one in traced:
        tokens = [token for block in one.block_ids for token in _tokens_of(block)]
        length = max(1, min(len(tokens), one.input_tokens // SHRINK))
        at_s = (one.time_s - first_s) / span_s * seconds
        requests.append(Request(at_s, tokens[:length], max(2, one.output_tokens // SHRINK // 2)))
    return requests


def _tokens_of(block: int) -> list[int]:
    """The tokens of one block of the trace."""
    start = block * 7919
    return [(start + 31 * i) % 100_000 for i in range(BLOCK_TOKENS)]


def steady(
    per_s: float, seconds: float, prompt_tokens: int, output_tokens: int, start_s: float = 0.0
) -> list[Request]:
    """Requests at equal intervals, each with a different prompt."""
    count = int(per_s * seconds)
    return [
        Request(
            start_s + number / per_s,
            [
                (7919 * (int(start_s) + 1) * (number + 1) + 31 * i) % 100_000
                for i in range(prompt_tokens)
            ],
            output_tokens,
        )
        for number in range(count)
    ]


async def replay(address: str, requests: Sequence[Request]) -> list[Measured]:
    """Send every request at its time; return what a client saw of each."""
    limits = httpx.Limits(max_connections=512, max_keepalive_connections=64)
    async with httpx.AsyncClient(base_url=address, timeout=120, limits=limits) as client:
        start = time.monotonic() + 0.5

        async def one(request: Request) -> Measured:
            body = json.dumps(
                {
                    "model": MODEL,
                    "prompt": request.tokens,
                    "max_tokens": request.output_tokens,
                    "temperature": 0,
                    "stream": True,
                    "stream_options": {"include_usage": True},
                    "kvpool": {"return_token_ids": True},
                }
            )
            await asyncio.sleep(max(0.0, start + request.at_s - time.monotonic()))
            return await send(client, body, request)

        return list(await asyncio.gather(*(one(request) for request in requests)))


async def send(client: httpx.AsyncClient, body: str, request: Request) -> Measured:
    """Send one streamed completion and time it."""
    asked = time.monotonic()
    first = last = 0.0
    usage: dict[str, Any] = {}
    try:
        async with client.stream("POST", "/v1/completions", content=body) as answer:
            if answer.status_code != 200:
                await answer.aread()
                return Measured(f"http {answer.status_code}")
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                last = time.monotonic()
                first = first or last
                item = json.loads(line[6:])
                if "error" in item:
                    return Measured(f"error {item['error'].get('code', '')}")
                usage = item.get("usage") or usage
    except httpx.HTTPError as error:
        return Measured(type(error).__name__)
    details = usage.get("prompt_tokens_details") or {}
    return Measured(
        "ok",
        first - asked,
        (last - first) / max(1, request.output_tokens - 1),
        len(request.tokens),
        details.get("cached_tokens", 0),
    )


def summary(
    name: str, measured: Sequence[Measured], arrivals_s: float, slo: tuple[float, float]
) -> dict[str, Any]:
    """One run's row. Goodput is the requests that met both objectives, per second in which requests arrived. The
    time that it takes to serve the rest afterwards is left out, since these requests miss their
    objectives anyway.
    """
    served = [m for m in measured if m.status == "ok"]
    ttft = np.array([m.ttft_s for m in served] or [0.0])
    good = sum(m.ttft_s <= slo[0] and m.tpot_s <= slo[1] for m in served)
    prompt = sum(m.prompt_tokens for m in served)
    return {
        "name": name,
        "mean_ttft_s": round(float(ttft.mean()), 4),
        "p50_ttft_s": round(float(np.percentile(ttft, 50)), 4),
        "p90_ttft_s": round(float(np.percentile(ttft, 90)), 4),
        "p99_ttft_s": round(float(np.percentile(ttft, 99)), 4),
        "mean_tpot_s": round(float(np.mean([m.tpot_s for m in served] or [0.0])), 4),
        "hit_ratio": round(sum(m.cached_tokens for m in served) / max(1, prompt), 4),
        "good": good,
        "goodput_per_s": round(good / arrivals_s, 3),
        "rejected": sum(m.status in REFUSED for m in measured),
        "failed": sum(m.status not in ("ok", *REFUSED) for m in measured),
    }
