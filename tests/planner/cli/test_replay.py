"""`kvpool replay` and `kvpool trace` from the command line: tables, JSON, pictures, exit statuses."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvpool.cli import app as cli
from kvpool.config.settings import EVICTION_POLICIES

Run = Callable[..., tuple[int, str, str]]
LINE = '{"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [1, 2]}\n'


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    monkeypatch.chdir(tmp_path)

    def call(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["kvpool", *args])
        status = 0
        try:
            cli.main()
        except SystemExit as exit_:
            status = int(exit_.code or 0)
        return status, *capsys.readouterr()

    return call


@pytest.fixture
def chat(run: Run) -> str:
    assert run("trace", "generate", "--requests", "200", "--seed", "1", "--out", "t.jsonl")[0] == 0
    return "t.jsonl"


def test_json_has_a_row_for_each_policy_and_capacity(run: Run, chat: str) -> None:
    status, out, _ = run("replay", chat, "--policy", "lru,arc", "--capacity", "100,500", "--json")
    found = json.loads(out)
    assert status == 0
    assert found["trace"] == chat
    keys = ("policy", "capacity_blocks")
    assert [tuple(row[k] for k in keys) for row in found["rows"]] == [
        *(("lru", 100), ("arc", 100), ("lru", 500), ("arc", 500))
    ]
    for row in found["rows"]:
        assert 0 < row["hit_ratio"] <= row["belady_hit_ratio"] < 1
        assert 0 < row["token_hit_ratio"] < 1
        assert row["ops_per_s"] > 0
        assert sum(w["blocks"] for w in row["over_time"]) == found["blocks"]


def test_all_means_every_policy_that_the_options_allow(run: Run, chat: str) -> None:
    _, out, _ = run("replay", chat, "--policy", "all", "--capacity", "100", "--json")
    assert [row["policy"] for row in json.loads(out)["rows"]] == [
        *EVICTION_POLICIES,
        "hazard",
        "guarded",
    ]
    _, out, _ = run("replay", chat, "--policy", "all", "--tiers", "a=9,b=99", "--json")
    assert [row["policy"] for row in json.loads(out)["rows"]] == list(EVICTION_POLICIES)


def test_tiers_are_given_in_blocks_or_bytes(run: Run, chat: str) -> None:
    rows: list[Any] = []
    for tiers in ("dram=100,nvme=300", "dram=100MiB,nvme=300MiB"):
        extra = ["--block-bytes", "1MiB"] if "MiB" in tiers else []
        _, out, _ = run("replay", chat, "--policy", "lru", "--tiers", tiers, *extra, "--json")
        [row] = json.loads(out)["rows"]
        rows.append(row)
    assert rows[0]["tiers"] == rows[1]["tiers"]
    assert [tier["capacity_blocks"] for tier in row["tiers"]] == [100, 300]
    assert row["capacity_blocks"] == 400
    assert sum(tier["hit_ratio"] for tier in row["tiers"]) == pytest.approx(row["hit_ratio"])


def test_a_table_and_a_picture_are_made(run: Run, chat: str) -> None:
    pytest.importorskip("matplotlib")
    status, out, _ = run("replay", chat, "--capacity", "100,500", "--plot", "out.png")
    assert status == 0
    assert "hit ratio" in out
    assert Path("out.png").read_bytes().startswith(b"\x89PNG")


def test_a_trace_is_described_as_text_or_json(run: Run, chat: str) -> None:
    _, out, _ = run("trace", "stats", chat, "--json")
    found = json.loads(out)
    assert found["requests"] == 200
    assert {"input_tokens", "turns", "reuse_distance_blocks", "sessions"} <= set(found)
    assert "reuse distance blocks" in run("trace", "stats", chat)[1]


def test_a_generated_trace_goes_to_stdout_without_a_file(run: Run, chat: str) -> None:
    _, out, _ = run("trace", "generate", "--requests", "200", "--seed", "1")
    assert out == Path(chat).read_text()


def test_bad_lines_are_numbered_and_counted(run: Run) -> None:
    Path("t.jsonl").write_text(LINE + '{"timestamp": 1, "inp\n' + LINE)
    status, out, err = run("replay", "t.jsonl", "--policy", "lru", "--capacity", "9", "--json")
    assert status == 0
    assert json.loads(out)["skipped_lines"] == 1
    assert json.loads(out)["requests"] == 2
    assert "1 lines skipped" in err
    assert "line 2: not JSON" in err
    status, _, err = run("replay", "t.jsonl", "--strict")
    assert status == 2
    assert "line 2" in err


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["replay", "absent.jsonl"], "cannot read the trace absent.jsonl"),
        (["replay", "empty.jsonl"], "holds no request"),
        (["trace", "stats", "empty.jsonl"], "holds no request"),
        (["replay", "one.jsonl", "--capacity", "0"], "'0' is not a capacity"),
        (["replay", "one.jsonl", "--capacity", "-5"], "'-5' is not a capacity"),
        (["replay", "one.jsonl", "--capacity", "many"], "'many' is not a capacity"),
        (["replay", "one.jsonl", "--capacity", ""], "'' is not a capacity"),
        (["replay", "one.jsonl", "--capacity", "9" * 5000], "is not a capacity"),
        (["replay", "one.jsonl", "--policy", "lruu"], "did you mean 'lru'"),
        (["replay", "one.jsonl", "--policy", "all,nope"], "unknown eviction policy 'nope'"),
        (["replay", "one.jsonl", "--policy", "guard"], "did you mean 'guarded'"),
        (["replay", "one.jsonl", "--policy", ","], "names no policy"),
        (["replay", "one.jsonl", "--tiers", "dram"], "'dram' is not a tier"),
        (["replay", "one.jsonl", "--tiers", "dram=0"], "'0' is not a capacity"),
        (["replay", "one.jsonl", "--tiers", "dram=1GiB"], "--block-bytes"),
        (["replay", "one.jsonl", "--tiers", "dram=x", "--block-bytes", "1MiB"], "not a size"),
        (
            ["replay", "one.jsonl", "--policy", "hazard", "--as-node"],
            "hazard supports neither tiers",
        ),
        (["replay", "one.jsonl", "--window", "0"], "--window 0.0 is out of range"),
        (["replay", "one.jsonl", "--block-tokens", "0"], "--block-tokens 0 is out of range"),
        (["replay", "one.jsonl", "--time-unit", "h"], "unknown unit of time 'h'"),
        (["replay", "one.jsonl", "--plot", "no/such.png"], "is not a directory"),
        (["replay", "one.jsonl", "--plot", "picture.doc"], ".doc is not an image format"),
        (["replay", "one.jsonl", "--tokenizer", "no-such-directory"], "no tokenizer in"),
        (["trace", "generate", "--kind", "talk"], "unknown kind of trace"),
        (["trace", "generate", "--requests", "0"], "0 requests"),
        (["trace", "generate", "--out", "no/such.jsonl"], "cannot write"),
    ],
)
def test_bad_input_is_one_line_and_status_2(run: Run, args: list[str], why: str) -> None:
    Path("empty.jsonl").touch()
    Path("one.jsonl").write_text(LINE)
    status, out, err = run(*args)
    assert status == 2
    assert out == ""
    assert why in err
    assert "Traceback" not in err
    assert len(err.splitlines()) == 1
