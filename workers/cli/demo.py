"""`kvpool demo`: runs a pool with a real model on this machine, and measures a hit.

One conductor, two pool nodes that pretend to be two hosts, one prefill worker and two decode
workers, as separate processes on loopback. Two questions are asked about one document. The second
is decoded by the other decode worker, which finds the document's KV in the pool.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.table import Table

from kvpool.cli.output import print_json
from kvpool.errors import KvpoolError
from kvpool.serving.supervisor import Supervisor

MODEL = "smollm2-135m"
MAX_NEW_TOKENS = 48
READY_TIMEOUT_S = 300.0  # three workers load torch and the model at the same time
REQUEST_TIMEOUT_S = 120.0
REPORT_WIDTH = 150
DOCUMENT_CHARS = 10_200  # about 2,000 tokens of the licence
QUESTIONS = (
    "Who may use the licensed work, and what does the patent grant cover?",
    "What must somebody do who redistributes the work or derivative works of it?",
)
LABELS = {
    "cold": "(a) first question: the pool is empty",
    "hit": "(b) second question, other worker: hit in the pool",
    "reference": "(c) the same without the pool: recomputed",
    "local": "(d) the same without the pool: hit in the engine's own cache",
}


class DemoFailed(KvpoolError):
    """The demo ran, but the pool did not work as it must."""

    code = "demo_failed"


@dataclass(slots=True)
class Answer:
    """One streamed answer as the client saw it, with the gateway's report."""

    ttft_s: float
    text: str
    report: dict[str, Any] = field(default_factory=dict)

    @property
    def token_ids(self) -> list[int]:
        """The generated tokens."""
        ids: list[int] = self.report["token_ids"]
        return ids


def demo(
    result_file: Annotated[Path, typer.Option(help="File for the result.")] = Path(
        "demo-result.json"
    ),
    log_dir: Annotated[
        Path | None,
        typer.Option(help="Directory for the logs of all processes; default: none are kept."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON on stdout.")
    ] = False,
) -> None:
    """Answer two questions about one document through a pool on this machine, and measure it.

    The exit status is 0 only if the second question finds the document in the pool, and if the pool
    and the engine's own cache give the same tokens.
    """
    out = _console(stderr=as_json)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvpool-demo-") as scratch:
        logs = log_dir or Path(scratch) / "logs"
        with _step(out, "preparing the model (converted once, then cached)"):
            model = _model()
        with Supervisor(logs) as supervisor:
            address, wire = _start(supervisor, out, Path(scratch), model)
            answers = _ask_all(out, address)
            result = _result(answers)
            _show(out, answers, result)
            out.print("\n[bold]kvpool stats[/bold]")
            _print_stats(out, wire)
            with _step(out, "stopping everything"):
                supervisor.stop()
    result_file.write_text(json.dumps(result, indent=2) + "\n")
    out.print(f"The demo took {time.monotonic() - started:.0f} s. The result is in {result_file}.")
    if as_json:
        print_json(result)
    _check(answers, result)


def _console(*, stderr: bool) -> Console:
    """The console for progress and tables; wide enough for the tables if it is not a terminal."""
    is_terminal = (sys.stderr if stderr else sys.stdout).isatty()
    return Console(stderr=stderr, highlight=False, width=None if is_terminal else REPORT_WIDTH)


@contextlib.contextmanager
def _step(out: Console, title: str) -> Iterator[None]:
    started = time.monotonic()
    out.print(f"  {title} ...")
    yield
    out.print(f"  {title}: {time.monotonic() - started:.1f} s")


def _model() -> Path:
    from workers.engine.model_files import default_cache_dir, prepare_model

    return prepare_model(MODEL, default_cache_dir())


def _start(supervisor: Supervisor, out: Console, scratch: Path, model: Path) -> tuple[str, str]:
    """Start the processes. Returns the conductor's HTTP and wire addresses."""
    free = ["--wire-port", "0", "--http-port", "0"]
    with _step(out, "starting conductor and two pool nodes"):
        conductor = supervisor.start(
            "conductor", ["conductor", *free, "--grpc-port", "0", "--model", str(model)]
        )
        nodes = [
            supervisor.launch(
                f"node-{host}",
                [
                    *("node", *free, "--grpc-port", "0", "--conductor", conductor["wire"]),
                    *("--host-label", f"host-{host}", "--dram", "512MiB"),
                    *("--nvme-directory", str(scratch / f"nvme-{host}"), "--nvme", "512MiB"),
                ],
            )
            for host in "ab"
        ]
        for node in nodes:
            supervisor.wait_ready(node, READY_TIMEOUT_S)
    with _step(out, "starting one prefill and two decode workers"):
        workers = [
            supervisor.launch(
                f"{role}-{host}",
                [
                    *("--set", "worker.advanced.local_cache_tokens=4096"),
                    *("worker", *free, "--role", role, "--conductor", conductor["wire"]),
                    *("--host-label", f"host-{host}", "--model", str(model)),
                    *("--model-name", MODEL),
                ],
            )
            for role, host in (("prefill", "a"), ("decode", "a"), ("decode", "b"))
        ]
        for worker in workers:
            supervisor.wait_ready(worker, READY_TIMEOUT_S)
    address = f"http://{conductor['http']}"
    _wait_for_members(address, nodes=2, workers=3)
    return address, conductor["wire"]


def _wait_for_members(address: str, *, nodes: int, workers: int) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        stats = httpx.get(f"{address}/v1/stats", timeout=5).json()
        if len(stats["nodes"]) >= nodes and len(stats["workers"]) >= workers:
            return
        time.sleep(0.1)
    raise DemoFailed("not all processes joined the conductor within 20 s")


def _ask_all(out: Console, address: str) -> dict[str, Answer]:
    document = _document()
    first, second = (f"{document}\n\nQuestion: {question}" for question in QUESTIONS)
    answers: dict[str, Answer] = {}
    with httpx.Client(base_url=address, timeout=REQUEST_TIMEOUT_S) as client:
        with _step(out, "warming up every worker (short prompts, which the pool does not keep)"):
            _warm_up(client, address)
        with _step(out, LABELS["cold"]):
            answers["cold"] = _chat(client, first)
        workers = _decode_workers(client)
        other = next(w for w in workers if w != answers["cold"].report["decode_worker"])
        with _step(out, LABELS["hit"]):
            answers["hit"] = _chat(client, second, decode_worker=other)
        with _step(out, LABELS["reference"]):
            answers["reference"] = _chat(client, second, decode_worker=other, pool="off")
        hit_tokens = answers["hit"].report["pool_tokens"]
        with _step(out, LABELS["local"]):
            # The engine computes the first prompt alone, then reuses the same prefix as from the
            # pool.
            _chat(client, first, decode_worker=other, pool="local")
            answers["local"] = _chat(
                client,
                second,
                decode_worker=other,
                pool="local",
                local_prefix_tokens=hit_tokens,
            )
    return answers


def _warm_up(client: httpx.Client, address: str) -> None:
    """Generate a few tokens on each decode worker."""
    for worker in _decode_workers(client):
        body = {
            "prompt": "The quick brown fox jumps over",
            "max_tokens": 4,
            "temperature": 0,
            "stream": True,
            "kvpool": {"pool": "off", "decode_worker": worker},
        }
        _stream(client, "/v1/completions", body)


def _decode_workers(client: httpx.Client) -> list[str]:
    stats = client.get("/v1/stats").json()
    return [
        w["descriptor"]["worker_id"]
        for w in stats["workers"]
        if w["descriptor"]["role"] != "prefill"
    ]


def _chat(client: httpx.Client, prompt: str, **options: Any) -> Answer:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": MAX_NEW_TOKENS,
        "temperature": 0,
        "stream": True,
        "kvpool": {"return_token_ids": True, **options},
    }
    return _stream(client, "/v1/chat/completions", body)


def _stream(client: httpx.Client, path: str, body: dict[str, Any]) -> Answer:
    started = time.monotonic()
    answer = Answer(0.0, "")
    with client.stream("POST", path, json=body) as response:
        if response.status_code != 200:
            raise DemoFailed(f"{path} returned {response.status_code}: {response.read().decode()}")
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise DemoFailed(f"{path} failed: {event['error']['message']}")
            if not answer.ttft_s:
                answer.ttft_s = time.monotonic() - started
            if "kvpool" in event:
                answer.report = event["kvpool"]
            for choice in event["choices"]:
                answer.text += choice.get("text") or choice.get("delta", {}).get("content") or ""
    return answer


def _document() -> str:
    """The Apache licence: a real document that comes with every installation."""
    try:
        text = distribution("kvpool").read_text("licenses/LICENSE")
    except PackageNotFoundError:
        text = None
    if not text:
        raise DemoFailed("the installation of kvpool has no file LICENSE", hint="install it again")
    return text[:DOCUMENT_CHARS]


def _result(answers: dict[str, Answer]) -> dict[str, Any]:
    hit = answers["hit"]
    read = hit.report["bytes_read"]
    return {
        "cold_ttft_s": round(answers["cold"].ttft_s, 4),
        "hit_ttft_s": round(hit.ttft_s, 4),
        "reference_ttft_s": round(answers["reference"].ttft_s, 4),
        "prompt_tokens": hit.report["prompt_tokens"],
        "hit_tokens": hit.report["pool_tokens"],
        "outputs_equal": hit.token_ids == answers["local"].token_ids,
        "bytes_moved": sum(read.values()),
        "transport": "+".join(sorted(read)) or "none",
    }


def _show(out: Console, answers: dict[str, Answer], result: dict[str, Any]) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("request")
    for column in ("prompt", "pool", "local", "computed", "TTFT", "prefill on", "moved"):
        table.add_column(column, justify="right")
    for name, answer in answers.items():
        report = answer.report
        moved = [f"{n / 1e6:.1f} MB read {t}" for t, n in report["bytes_read"].items()]
        moved += [f"{n / 1e6:.1f} MB written {t}" for t, n in report["bytes_written"].items()]
        table.add_row(
            LABELS[name],
            str(report["prompt_tokens"]),
            str(report["pool_tokens"]),
            str(report["local_tokens"]),
            str(report["computed_tokens"]),
            f"{answer.ttft_s:.3f} s",
            "remote" if report["mode"] == "disaggregated" else "decode worker",
            ", ".join(moved) or "-",
        )
    out.print()
    out.print(table)
    split = Table(box=None, pad_edge=False, title="TTFT by phase, ms", title_justify="left")
    split.add_column("phase")
    names = list(dict.fromkeys(p for a in answers.values() for p in a.report["phases"]))
    for answer_name in answers:
        split.add_column(answer_name, justify="right")
    for phase in names:
        cells = [answers[a].report["phases"].get(phase) for a in answers]
        split.add_row(phase, *("-" if c is None else f"{1000 * c:.1f}" for c in cells))
    out.print()
    out.print(split)
    hit = answers["hit"]
    ratio = result["reference_ttft_s"] / result["hit_ttft_s"]
    verified = hit.report["verified_blocks"]
    out.print()
    out.print(f"The model's answer in (b): {hit.text.strip()[:300]}")
    out.print(
        f"Time to first token: {result['hit_ttft_s']:.3f} s with the pool (b),"
        f" {result['reference_ttft_s']:.3f} s without (c), {ratio:.1f} times as long."
    )
    out.print(
        f"All {verified} blocks read from the pool have the checksums with which they were written."
    )
    same = "the same" if result["outputs_equal"] else "DIFFERENT"
    out.print(f"The pool (b) and the engine's own cache (d) give {same} tokens.")


def _print_stats(out: Console, wire: str) -> None:
    stats = subprocess.run(
        [sys.executable, "-P", "-m", "kvpool", "stats", "--conductor", wire],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        env={**os.environ, "COLUMNS": str(shutil.get_terminal_size((120, 40)).columns)},
    )
    if stats.returncode != 0:
        raise DemoFailed(f"kvpool stats failed: {stats.stderr.strip()}")
    out.print(stats.stdout.rstrip(), markup=False)


def _check(answers: dict[str, Answer], result: dict[str, Any]) -> None:
    if not result["hit_tokens"]:
        raise DemoFailed("the second question found nothing in the pool")
    if not result["outputs_equal"]:
        raise DemoFailed("the pool and the engine's own cache give different tokens")
    blocks = answers["hit"].report["verified_blocks"]
    if not blocks:
        raise DemoFailed("no block was verified after the read")
