"""Scheduling with real processes, the real pool and engines that sleep: strategies, admission, roles.

    python -m benchmarks.scheduler [--trace trace.jsonl] [--strategies kv-centric,random,...]
    python -m benchmarks.scheduler --only overload,roles

Each run starts its own pool: 3 nodes on 3 pretended hosts and 8 workers with fake engines (4
prefill, 4 decode), which sleep as a cost model says and verify every byte of KV that they load. The
trace has Mooncake's format (`timestamp` ms, `input_length`, `output_length`, `hash_ids` of 512
tokens each). Tokens are divided by 8, so a block of the trace has 64 tokens, and arrivals are
scaled to `--seconds`. Without a trace, a synthetic one of conversations with many turns is used.
Writes bench-scheduler.json and .png:

    strategies   the trace, one strategy after the other, without objectives
    overload     the same trace `--overload` times as fast, with objectives: refusing early, and never
    roles        long prompts, then long answers: the role controller, and the split left as it is
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.fake_pool import HOSTS, start_pool
from benchmarks.traffic import Measured, Request, read_trace, replay, steady, summary, synthetic
from kvpool.serving.supervisor import Supervisor

STRATEGIES = "kv-centric,cache-aware,least-loaded,random"
PARTS = "strategies,overload,roles"
PREFILLERS, DECODERS = 4, 4
SLO = tuple[float, float]  # TTFT and TPOT, seconds
# A decode step takes 20 ms and 10 ms for each sequence: 0.1 s allow 8 at once.
ROLES_ENGINE = ("fake_engine.tpot_sequence_s=0.01", "fake_engine.bytes_per_token=256")
ROLES_LIMITS = (
    "conductor.advanced.roles_window_s=4",
    "conductor.advanced.roles_hold_s=0.5",
    "conductor.advanced.roles_cooldown_s=2",
    "conductor.advanced.roles_min_requests=5",
)
ROLES_SLO: SLO = (2.0, 0.12)
# Otherwise decode workers prefill while prefill workers are busy, and no worker helps the other way
# round.
ALL_REMOTE = "rules: [{name: apart, match: {min_prompt_tokens: 64}, mode: disaggregated}]\n"
LOOK_S = 0.5


def run(
    settings: Sequence[str],
    requests: Sequence[Request],
    name: str,
    slo: SLO,
    *,
    prefill: int = PREFILLERS,
    decode: int = DECODERS,
    engine: Sequence[str] = (),
    hosts: Sequence[str] = HOSTS,
) -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]:
    """A fresh pool and all the requests.

    Returns:
        The row; how many workers had which role at each look; and the role controller's moves.
    """
    with tempfile.TemporaryDirectory() as logs, Supervisor(Path(logs)) as supervisor:
        address = start_pool(
            supervisor, settings, prefill=prefill, decode=decode, engine=engine, hosts=hosts
        )
        measured, looks, moves = asyncio.run(_watched(address, requests))
        return summary(name, measured, requests[-1].at_s, slo), looks, moves


async def _watched(
    address: str, requests: Sequence[Request]
) -> tuple[list[Measured], list[dict[str, Any]], list[dict[str, Any]]]:
    """Replay the requests, and record the roles meanwhile."""
    looks: list[dict[str, Any]] = []
    last: dict[str, Any] = {}

    async def look() -> None:
        started = time.monotonic()
        async with httpx.AsyncClient(base_url=address, timeout=10) as client:
            while True:
                last.update((await client.get("/v1/scaling")).json())
                at_s = round(time.monotonic() - started, 1)
                roles = {role: last["instances"][role] for role in ("prefill", "decode")}
                looks.append({"at_s": at_s, **roles})
                await asyncio.sleep(LOOK_S)

    looking = asyncio.create_task(look())
    try:
        measured = await replay(address, requests)
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
    return measured, looks, last.get("moves", [])


def objectives(slo: SLO, admission: str) -> list[str]:
    """Settings of a conductor with these objectives."""
    return [
        f"conductor.slo_ttft_s={slo[0]}",
        f"conductor.slo_tpot_s={slo[1]}",
        f"conductor.admission={admission}",
    ]


def overload(
    requests: Sequence[Request], settings: Sequence[str], slo: SLO, **pool: Any
) -> dict[str, Any]:
    """Send the same requests with early rejection and without."""
    rows = {}
    for name, admission in (("with_rejection", "predicted"), ("without", "none")):
        rows[name] = run([*objectives(slo, admission), *settings], requests, name, slo, **pool)[0]
        print(json.dumps(rows[name]), flush=True)
    return {"slo_ttft_s": slo[0], "slo_tpot_s": slo[1], "requests": len(requests), **rows}


def roles(seconds: float, settings: Sequence[str], slo: SLO = ROLES_SLO) -> dict[str, Any]:
    """Long prompts, then long answers, `seconds` each: with the role controller, and with the fixed split."""
    # 2,000 tokens take a prefill worker 0.7 s: 6.5 a second need four and a half of them.
    requests = steady(6.5, seconds, 2000, 8)
    # 60 tokens at 0.1 s take a place of a decode worker's for 6 s: 5 a second need four of those.
    requests += steady(5.0, seconds, 100, 60, start_s=seconds)
    rows: dict[str, Any] = {"shift_at_s": seconds, "slo_ttft_s": slo[0], "slo_tpot_s": slo[1]}
    with tempfile.TemporaryDirectory() as directory:
        rules = Path(directory) / "rules.yaml"
        rules.write_text(ALL_REMOTE)
        base = [*objectives(slo, "none"), f"conductor.rules_path={rules}", *ROLES_LIMITS]
        for name, moves in (("with_controller", "true"), ("fixed", "false")):
            sets = [*base, f"conductor.move_roles={moves}", *settings]
            row, looks, moved = run(sets, requests, name, slo, engine=ROLES_ENGINE)
            rows[name] = row
            print(json.dumps(row), flush=True)
            if name == "with_controller":
                rows["over_time"] = looks
                rows["moves"] = [{"role": one["role"], "reason": one["reason"]} for one in moved]
                print(json.dumps(rows["moves"]), flush=True)
    return rows


def draw(document: dict[str, Any], path: Path) -> None:
    """Plot TTFT and goodput by strategy, goodput under overload, and roles over time, as far as they were run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    parts = [part for part in ("ttft", *PARTS.split(",")) if _is_drawn(part, document)]
    figure, axes = pyplot.subplots(1, len(parts), figsize=(5.2 * len(parts), 4), squeeze=False)
    for part, axis in zip(parts, axes[0], strict=True):
        if part == "roles":
            looks = document["roles"]["over_time"]
            for role in ("prefill", "decode"):
                axis.step([x["at_s"] for x in looks], [x[role] for x in looks], label=role)
            axis.axvline(document["roles"]["shift_at_s"], linestyle=":", color="gray")
            axis.set_xlabel("seconds: long prompts, then long answers")
            axis.set_ylabel("instances")
            axis.legend()
            continue
        rows = document.get("strategies", [])
        if part == "overload":
            rows = [document["overload"][name] for name in ("with_rejection", "without")]
        where = np.arange(len(rows))
        axis.set_xticks(where, [row["name"] for row in rows])
        if part == "ttft":
            for shift, key in enumerate(("mean_ttft_s", "p90_ttft_s", "p99_ttft_s")):
                axis.bar(where + 0.27 * (shift - 1), [row[key] for row in rows], 0.25, label=key)
            axis.set_ylabel("seconds")
            axis.legend()
        else:
            axis.bar(where, [row["goodput_per_s"] for row in rows], 0.5)
            axis.set_ylabel(f"goodput, requests per second ({part})")
    figure.tight_layout()
    figure.savefig(path)


def _is_drawn(part: str, document: dict[str, Any]) -> bool:
    return ("strategies" if part == "ttft" else part) in document


def main() -> None:
    """Run the parts one after the other; print and write their results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--skip", type=int, default=0)
    parser.add_argument("--requests", type=int, default=180)
    parser.add_argument("--seconds", type=float, default=36.0)
    parser.add_argument("--strategies", default=STRATEGIES)
    parser.add_argument("--only", default=PARTS, help=f"some of {PARTS}")
    parser.add_argument("--overload", type=float, default=2.5, help="times as fast")
    parser.add_argument("--roles-seconds", type=float, default=24.0, help="of each kind of load")
    parser.add_argument("--slo-ttft", type=float, default=2.0)
    parser.add_argument("--slo-tpot", type=float, default=0.1)
    parser.add_argument("--set", dest="settings", action="append", default=[])
    parser.add_argument("--out", type=Path, default=Path("bench-scheduler"))
    given = parser.parse_args()
    parts = given.only.split(",")
    unknown = sorted(set(parts) - set(PARTS.split(",")))
    if unknown:
        parser.error(f"no part is called {unknown[0]}: {PARTS}")

    def requests(seconds: float) -> list[Request]:
        if given.trace is None:
            return synthetic(given.requests, seconds)
        return read_trace(given.trace, given.skip, given.requests, seconds)

    slo = (given.slo_ttft, given.slo_tpot)
    document: dict[str, Any] = {
        "trace": given.trace.name if given.trace else "synthetic",
        "requests": given.requests,
    }
    if "strategies" in parts:
        rows = document["strategies"] = []
        for strategy in given.strategies.split(","):
            sets = [*objectives((3600, 3600), "none"), f"conductor.strategy={strategy}"]
            row = run([*sets, *given.settings], requests(given.seconds), strategy, slo)[0]
            print(json.dumps(row), flush=True)
            rows.append(row)
    if "overload" in parts:
        fast = requests(given.seconds / given.overload)
        document["overload"] = overload(fast, given.settings, slo)
    if "roles" in parts:
        document["roles"] = roles(given.roles_seconds, given.settings)
    given.out.with_suffix(".json").write_text(json.dumps(document, indent=2) + "\n")
    draw(document, given.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
