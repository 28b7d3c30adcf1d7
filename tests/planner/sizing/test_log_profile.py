"""Profiles of request logs: known fields are counted, missing ones are None, bad lines are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvpool.errors import ConfigError
from planner.sizing.log_profile import RagRule, profile_log, report
from tests.support.fork_server import run_kvpool


def profile(*rows: dict[str, Any], **options: Any) -> dict[str, Any]:
    return report(profile_log([json.dumps(row) for row in rows], "log", **options))


def test_lengths_rates_and_latencies_are_read_under_their_usual_names() -> None:
    found = profile(
        {
            "timestamp": 0,
            "prompt_tokens": 100,
            "completion_tokens": 11,
            "ttft_ms": 250,
            "tpot": 0.05,
        },
        {
            "timestamp": 10,
            "usage": {"prompt_tokens": 300, "completion_tokens": 21},
            "ttft_s": 0.5,
            "latency": 2.5,
        },
    )
    assert found["input_tokens"]["mean"] == 200
    assert found["output_tokens"]["max"] == 21
    assert found["ttft_s"]["mean"] == pytest.approx(0.375)
    assert found["tpot_s"]["mean"] == pytest.approx((0.05 + 2.0 / 20) / 2)
    assert found["rate_per_s"]["mean"] == pytest.approx(0.2)
    assert found["total_prompt_to_output"] == pytest.approx(400 / 32)
    assert json.loads(msgspec.json.encode(found, enc_hook=str)) == found  # nothing of numpy's


def test_what_a_log_does_not_say_is_unknown() -> None:
    found = profile({"prompt": "Hello there, how are you?"})
    for name in ("output_tokens", "ttft_s", "tpot_s", "streaming_share", "turns", "rate_per_s"):
        assert found[name] is None
    assert found["input_tokens"]["mean"] == 7


def test_turns_come_from_messages_sessions_or_shared_blocks() -> None:
    def ask(*roles: str) -> dict[str, Any]:
        return {"messages": [{"role": role, "content": "word " * 9} for role in roles]}

    found = profile(ask("system", "user"), ask("user", "assistant", "user"))
    assert (found["turns"]["mean"], found["multi_turn_share"]) == (1.5, 0.5)
    of_session = {"input_length": 5, "session_id": "s"}
    assert profile(of_session, of_session, of_session)["turns"]["max"] == 3
    chats = [[0, 1, 2], [0, 7, 8], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5]]
    rows = [{"timestamp": 0, "input_length": 512 * len(ids), "hash_ids": ids} for ids in chats]
    found = profile(*rows)
    assert found["turns"]["max"] == 3
    assert found["multi_turn_share"] == 0.5
    assert found["prefix_reuse"] == pytest.approx((1 + 3 + 5) / 17, abs=1e-4)


def test_prompts_that_only_begin_alike_are_no_turns_of_one_another() -> None:
    # The last block of the third request is not full, so its next turn gives it another id.
    chats = [[0, 1, 2], [0, 1, 7], [0, 1, 8, 9], [0, 1, 8, 11, 10]]
    lengths = [1536, 1536, 1900, 2500]
    rows = [{"input_length": n, "hash_ids": c} for n, c in zip(lengths, chats, strict=True)]
    found = profile(*rows)
    assert (found["turns"]["max"], found["multi_turn_share"]) == (2, 0.25)


def test_rag_is_recognized_by_length_pattern_or_named_documents() -> None:
    long = {"prompt_tokens": 5000, "completion_tokens": 50}
    chatty = {"prompt_tokens": 5000, "completion_tokens": 2500}
    marked = {"prompt": "<context>facts</context> Why?", "completion_tokens": 5}
    named = {"prompt": "Why?", "documents": ["facts"], "completion_tokens": 5}
    assert profile(long, chatty, marked, named)["rag_share"] == 0.75
    assert profile(long, chatty, rule=RagRule(min_ratio=2))["rag_share"] == 1.0
    with pytest.raises(ConfigError, match="pattern"):
        RagRule(pattern="(")


def test_the_share_of_streams_counts_only_requests_that_say_so() -> None:
    rows = [{"prompt": "Hi you", "stream": flag} for flag in (True, True, False)]
    assert profile(*rows, {"prompt": "Hi you"})["streaming_share"] == pytest.approx(2 / 3, abs=1e-4)


@pytest.mark.parametrize(
    "bad",
    ['{"prompt": "x', "7", "{}", '{"prompt_tokens": -1}', '{"prompt": "x", "ttft": -1}',
     '{"prompt": "x", "timestamp": "noon"}', '{"input_length": 3, "hash_ids": ["a"]}',
     '{"input_length": 0}', '{"input_length": 1024, "hash_ids": [1]}',
     '{"input_length": 512, "hash_ids": [1, 2]}'],
)  # fmt: skip
def test_bad_lines_are_named_and_skipped_or_end_a_strict_read(bad: str) -> None:
    good = '{"prompt": "hello"}'
    found = profile_log([good, bad], "log")
    assert found.read.skipped == 1
    assert found.read.first[0].startswith("line 2: ")
    assert len(found.inputs) == len(found.turns) == 1
    with pytest.raises(ConfigError, match="log, line 2: "):
        profile_log([good, bad], "log", is_strict=True)
    with pytest.raises(ConfigError, match="no request"):
        profile_log([bad], "log")


def test_lines_out_of_order_are_counted_or_end_a_strict_read() -> None:
    rows = [json.dumps({"prompt": "hello", "timestamp": at}) for at in (5, 2, 9)]
    found = profile_log(rows, "log")
    assert (found.read.unsorted, found.read.skipped, len(found.inputs)) == (1, 0, 3)
    assert report(found)["problems"][0].startswith("line 2: its time, 2 s")
    with pytest.raises(ConfigError, match="log, line 2: its time"):
        profile_log(rows, "log", is_strict=True)


def test_the_block_size_of_a_trace_is_derived_from_its_first_lines() -> None:
    rows = [{"timestamp": n, "input_length": 161 + n, "hash_ids": [*range(11)]} for n in range(10)]
    assert profile(*rows)["skipped_lines"] == 0
    assert profile(*rows, {"timestamp": 99, "input_length": 64, "hash_ids": [1]})["problems"] == [
        "line 11: 1 hash_ids, but input_length 64 implies 4 of 16 tokens"
    ]


def test_the_command_says_how_many_lines_were_bad_and_where(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"prompt": "hello"}\n' + "7\n" * 9)
    command = ["plan", "profile", str(path)]
    done = run_kvpool(*command)
    assert done.returncode == 0
    assert "9 lines skipped" in done.stderr
    assert "line 2: not a JSON object" in done.stderr
    assert "and 4 more" in done.stderr
    done = run_kvpool(*command, "--strict")
    assert done.returncode == 2
    assert "line 2" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_command_prints_a_table_or_one_document(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"prompt_tokens": 100, "completion_tokens": 10, "stream": true}\n')
    command = ["plan", "profile", str(path)]
    done = run_kvpool(*command, "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["streaming_share"] == 1.0
    done = run_kvpool(*command)
    assert done.returncode == 0
    assert "streaming" in done.stdout
    command[-1] = str(tmp_path / "absent")
    done = run_kvpool(*command)
    assert done.returncode == 2
    assert done.stderr.startswith("error: cannot read")
