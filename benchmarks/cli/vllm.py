"""`kvpool bench vllm`: measures how much TTFT the pool saves with vLLM on this machine."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.vllm_backends import PEERS
from benchmarks.vllm_run import PAGE_TOKENS, Bench, Order
from kvpool.cli.output import AsJson, console, error_console, print_json, print_table
from kvpool.errors import ConfigError, InvalidArgument, did_you_mean

MAX_TOKENS = 8192 - 2 * PAGE_TOKENS


def vllm(
    model: Annotated[str, typer.Option(help="Model directory, or smollm2-135m.")] = "smollm2-135m",
    tokens: Annotated[
        str, typer.Option(help="Prompt lengths, separated by commas; half a page is added to each.")
    ] = "1024,2048,4096,7168",
    repeats: Annotated[int, typer.Option(min=1, help="Prompts of each length.")] = 3,
    peers: Annotated[
        str, typer.Option(help="Some of mooncake,offloading,lmcache; or none.")
    ] = "mooncake,offloading,lmcache",
    saving_tokens: Annotated[
        int, typer.Option(min=0, help="Length of the prompts that measure saving; 0: none.")
    ] = 2048,
    threads: Annotated[
        int, typer.Option(min=0, help="Threads of each vLLM process; 0: one per core.")
    ] = 0,
    logs: Annotated[
        Path | None, typer.Option(help="Keep the processes' logs here; it must not exist.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure vLLM's TTFT with the prompt in the pool, against computing it, vLLM's own hits and peers."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError("vLLM is not installed", hint="pip install 'kvpool[vllm]'")
    from workers.engine.model_files import default_cache_dir, prepare_model

    names = [] if peers in ("", "none") else peers.split(",")
    for name in names:
        if name not in PEERS:
            raise InvalidArgument(f"unknown peer {name!r}", hint=did_you_mean(name, PEERS))
    order = Order(
        prepare_model(model, default_cache_dir()),
        [_size(text) for text in tokens.split(",")],
        repeats,
        names,
        _size(str(saving_tokens)) if saving_tokens else 0,
        env={"OMP_NUM_THREADS": str(threads or os.cpu_count() or 1)},
    )
    with tempfile.TemporaryDirectory(prefix="kvpool-bench-") as scratch:
        directory = logs or Path(scratch) / "logs"
        directory.mkdir(parents=True)
        report = Bench(order, directory, error_console().print).run()
    if as_json:
        print_json(report)
    else:
        _show(report, names)


def _show(report: dict[str, Any], peers: list[str]) -> None:
    measured = [name for name in peers if name not in report["not_measured"]]
    rows = []
    for row in report["rows"]:
        pool = row["pool_ttft_s"]
        rows.append(
            [
                str(row["prompt_tokens"]),
                _ms(row["recompute_ttft_s"]),
                _ms(pool),
                _ms(row["local_prefix_hit_ttft_s"]),
                *(_ms(row["peers"][name]) if name in row["peers"] else "-" for name in measured),
                f"{row['recompute_ttft_s'] / pool:.1f}x",
                f"{pool / row['local_prefix_hit_ttft_s']:.2f}",
                "equal" if row["outputs_equal"] else "DIFFERENT",
            ]
        )
    columns = ("prompt", "recompute", "pool", "local hit", *measured)
    print_table(
        (*columns, "faster", "of local hit", "outputs"),
        rows,
        right=(*columns, "faster", "of local hit"),
    )
    out = console()
    saving = report["saving"]
    if saving:
        out.print(
            f"a prefill of {saving['prompt_tokens']} tokens that is saved takes"
            f" {saving['prefill_time_ratio']:.3f} of the time of one that is not"
            f" ({saving['lowest']:.3f} to {saving['highest']:.3f})"
        )
    for name, reason in report["not_measured"].items():
        out.print(f"{name} was not measured: {reason}")
    error_console().print(
        "TTFT are medians in ms. outputs: whether pool and local hit give equal tokens."
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f}"


def _size(text: str) -> int:
    size = int(text) if text.strip().isdigit() else 0
    if not PAGE_TOKENS <= size <= MAX_TOKENS or size % PAGE_TOKENS:
        raise InvalidArgument(
            f"prompt length {text!r} is invalid",
            hint=f"give multiples of {PAGE_TOKENS} up to {MAX_TOKENS}",
        )
    return size
