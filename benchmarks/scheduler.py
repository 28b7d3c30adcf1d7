"""Scheduling strategies side by side: one trace, real processes, the real pool; only the engines sleep.

    python -m benchmarks.scheduler [--trace conversation_trace.jsonl] [--strategies kv-centric,random,...]

Each strategy gets a pool of its own: 3 nodes on 3 pretended hosts and 8 fake-engine workers (4 prefill, 4
decode), which take the time that a cost model says and verify every byte of KV that they load. The trace is
Mooncake's format (`timestamp` ms, `input_length`, `output_length`, `hash_ids` of 512 tokens each); tokens are
scaled down by 8, so that a block of the trace is one of 64 tokens, and arrivals are scaled to `--seconds`.
Without a trace a synthetic one of many-turn conversations is used. Writes bench-scheduler.json and .png.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from kvpool.fleet import Fleet

SHRINK = 8
BLOCK_TOKENS = 64
HOSTS = ("h0", "h1", "h2")
PREFILLERS, DECODERS = 4, 4
STRATEGIES = "kv-centric,cache-aware,least-loaded,random"
MODEL = "fake"
ENGINE = (
    "fake_engine.prefill_base_s=0.01",
    "fake_engine.prefill_token_s=2.5e-4",
    "fake_engine.prefill_attention_s=1e-7",
    "fake_engine.tpot_base_s=0.02",
    "fake_engine.tpot_sequence_s=0.001",
    "fake_engine.bytes_per_token=4096",
)


@dataclass(slots=True, frozen=True)
class Request:
    """One request of a trace, scaled."""

    at_s: float
    tokens: list[int]
    output_tokens: int


@dataclass(slots=True)
class Measured:
    """What a client saw of one request."""

    status: str
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0


def read_trace(path: Path, skip: int, count: int, seconds: float) -> list[Request]:
    """`count` requests of a trace file after the first `skip`, spread over `seconds`."""
    with path.open() as lines:
        rows = [json.loads(line) for _, line in zip(range(skip + count), lines, strict=False)]
    return scaled(rows[skip:], seconds)


def synthetic(count: int, seconds: float, seed: int = 1) -> list[Request]:
    """Conversations of a few turns over some shared system prompts, as rows of a trace."""
    chance = random.Random(seed)
    rows: list[dict[str, Any]] = []
    next_id = 100
    open_chats: list[list[int]] = []
    for number in range(count):
        if open_chats and chance.random() < 0.6:
            ids = open_chats.pop(chance.randrange(len(open_chats)))
        else:
            ids = list(range(10 * chance.randrange(4), 10 * chance.randrange(4) + 4))
        grown = [*ids, *range(next_id, next_id + chance.randint(2, 14))]
        next_id = grown[-1] + 1
        rows.append(
            {
                "timestamp": number * 100,
                "input_length": 512 * len(grown) - chance.randrange(500),
                "output_length": chance.randint(30, 600),
                "hash_ids": grown,
            }
        )
        open_chats.append(grown)
    return scaled(rows, seconds)


def scaled(rows: Sequence[dict[str, Any]], seconds: float) -> list[Request]:
    """Rows of a trace as requests with token ids."""
    first = rows[0]["timestamp"]
    span = max(1, rows[-1]["timestamp"] - first)
    requests = []
    for row in rows:
        tokens = [token for block in row["hash_ids"] for token in _tokens_of(block)]
        length = max(1, min(len(tokens), row["input_length"] // SHRINK))
        at_s = (row["timestamp"] - first) / span * seconds
        requests.append(Request(at_s, tokens[:length], max(2, row["output_length"] // SHRINK // 2)))
    return requests


def _tokens_of(block: int) -> list[int]:
    """The tokens that stand for one block of the trace."""
    start = block * 7919
    return [(start + 31 * i) % 100_000 for i in range(BLOCK_TOKENS)]


def start_pool(fleet: Fleet, strategy: str, settings: Sequence[str]) -> str:
    """Conductor, nodes and workers; returns the gateway's address."""
    free = ("--wire-port", "0", "--http-port", "0")
    chosen = [*settings, *([f"conductor.strategy={strategy}"] if strategy else [])]
    conductor = fleet.start("conductor", [*_sets(chosen), "conductor", *free, "--grpc-port", "0"])
    nodes = [
        fleet.launch(
            f"node-{host}",
            [
                *_sets(("node.slab_bytes=16MiB",)),
                *("node", *free, "--grpc-port", "0", "--dram", "640MiB"),
                *("--host-label", host, "--conductor", conductor["wire"]),
            ],
        )
        for host in HOSTS
    ]
    for node in nodes:
        fleet.wait_ready(node, 60)
    roles = ["prefill"] * PREFILLERS + ["decode"] * DECODERS
    workers = []
    for number, role in enumerate(roles):
        sets = ("worker.engine=fake", "worker.max_concurrent=256", *ENGINE)
        workers.append(
            fleet.launch(
                f"worker-{number}",
                [
                    *_sets((*sets, "worker.max_model_tokens=262144")),
                    *("worker", *free, "--role", role, "--model-name", MODEL),
                    *("--host-label", HOSTS[number % len(HOSTS)]),
                    *("--conductor", conductor["wire"]),
                ],
            )
        )
    for worker in workers:
        fleet.wait_ready(worker, 120)
    address = f"http://{conductor['http']}"
    deadline = time.monotonic() + 30
    while len(httpx.get(f"{address}/v1/stats").json()["workers"]) < len(roles):
        if time.monotonic() > deadline:
            raise RuntimeError("not all workers joined")
        time.sleep(0.1)
    return address


def _sets(settings: Sequence[str]) -> list[str]:
    return [text for setting in settings for text in ("--set", setting)]


async def replay(address: str, requests: Sequence[Request]) -> list[Measured]:
    """Send every request at its time; returns what became of each."""
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
    """One streamed completion, timed."""
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
    name: str, measured: Sequence[Measured], elapsed_s: float, slo: tuple[float, float]
) -> dict[str, Any]:
    """One strategy's row. Goodput counts requests that met both objectives, a second of the run."""
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
        "goodput_per_s": round(good / elapsed_s, 3),
        "rejected": sum(m.status in ("http 429", "http 503") for m in measured),
        "failed": sum(m.status not in ("ok", "http 429", "http 503") for m in measured),
    }


def run_strategy(
    strategy: str, requests: Sequence[Request], settings: Sequence[str], slo: tuple[float, float]
) -> dict[str, Any]:
    """A fresh pool, the whole trace, one row."""
    with tempfile.TemporaryDirectory() as logs, Fleet(Path(logs)) as fleet:
        address = start_pool(fleet, strategy, settings)
        started = time.monotonic()
        measured = asyncio.run(replay(address, requests))
        return summary(strategy or "default", measured, time.monotonic() - started, slo)


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """TTFT by strategy, and what was served within the objectives."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4))
    names = [row["name"] for row in rows]
    where = np.arange(len(rows))
    for shift, key in enumerate(("mean_ttft_s", "p90_ttft_s", "p99_ttft_s")):
        left.bar(where + 0.27 * (shift - 1), [row[key] for row in rows], 0.25, label=key)
    left.set_xticks(where, names)
    left.set_ylabel("seconds")
    left.legend()
    right.bar(where, [row["goodput_per_s"] for row in rows], 0.5)
    right.set_xticks(where, names)
    right.set_ylabel("goodput, requests a second")
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    """Run the strategies one after the other; print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--skip", type=int, default=0)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=45.0)
    parser.add_argument("--strategies", default=STRATEGIES)
    parser.add_argument("--slo-ttft", type=float, default=2.0)
    parser.add_argument("--slo-tpot", type=float, default=0.1)
    parser.add_argument("--set", dest="settings", action="append", default=[])
    parser.add_argument("--out", type=Path, default=Path("bench-scheduler"))
    given = parser.parse_args()
    if given.trace is not None:
        requests = read_trace(given.trace, given.skip, given.requests, given.seconds)
    else:
        requests = synthetic(given.requests, given.seconds)
    slo = (given.slo_ttft, given.slo_tpot)
    settings = [
        f"conductor.slo_ttft_s={3600 if not given.settings else given.slo_ttft}",
        f"conductor.slo_tpot_s={3600 if not given.settings else given.slo_tpot}",
        *given.settings,
    ]
    rows = []
    for strategy in given.strategies.split(","):
        rows.append(run_strategy(strategy, requests, settings, slo))
        print(json.dumps(rows[-1]), flush=True)
    trace = given.trace.name if given.trace else "synthetic"
    document = {"trace": trace, "requests": len(requests), "strategies": rows}
    given.out.with_suffix(".json").write_text(json.dumps(document, indent=2) + "\n")
    draw(rows, given.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
