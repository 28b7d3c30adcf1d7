"""The routing rules: valid documents, which requests match, and what thresholds do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.members.membership import State
from conductor.routing.load_facts import pool_facts
from conductor.routing.rules import Facts, RoutingRules, choose, draw, parse_rules
from conductor.routing.rules_file import RulesFile
from conductor.routing.service import RulesService
from conductor.scheduling.inputs import SchedulingInputs, WorkerStatus
from kvpool.errors import ConfigError, InvalidArgument
from kvpool.wire import messages as m

LONG = Facts(model="m", prompt_tokens=4000, output_tokens=100, key="k")


def mode_of(text: str, facts: Facts = LONG) -> tuple[str, str]:
    verdict = choose(parse_rules(text), facts)
    return verdict.mode, verdict.reason


def test_an_empty_document_leaves_everything_to_cost() -> None:
    assert mode_of("") == ("", "cost")
    assert parse_rules("") == RoutingRules()


@pytest.mark.parametrize(
    ("text", "just_enough", "too_little"),
    [
        ("remote_prefill: {min_input_tokens: 512}", {"found_tokens": 3488}, {"found_tokens": 3489}),
        ("remote_prefill: {min_output_tokens: 64}", {"output_tokens": 64}, {"output_tokens": 63}),
        (
            "remote_prefill: {min_decode_pressure: 0.5}",
            {"decode_pressure": 0.5},
            {"decode_pressure": 0.4},
        ),
        ("remote_prefill: {max_queue_wait_s: 2.0}", {"queue_wait_s": 2.0}, {"queue_wait_s": 2.1}),
        (
            "fallback: {max_prefill_queue_tokens: 900}",
            {"queue_tokens": 900},
            {"queue_tokens": 901},
        ),
        ("local_prefill: {max_input_tokens: 100}", {"prompt_tokens": 101}, {"prompt_tokens": 100}),
        (
            "local_prefill: {min_prefix_hit: 0.5}",
            {"found_tokens": 1999},
            {"found_tokens": 2000},
        ),
    ],
)
def test_each_threshold_turns_at_its_value(
    text: str, just_enough: dict[str, float], too_little: dict[str, float]
) -> None:
    def facts(changes: dict[str, float]) -> Facts:
        values = {"prompt_tokens": 4000, "output_tokens": 100, "key": "k", **changes}
        return Facts(**values)  # type: ignore[arg-type]

    assert mode_of(text, facts(just_enough))[0] == ""
    mode, reason = mode_of(text, facts(too_little))
    assert mode == "local"
    assert reason in text.replace(": {", ".")  # the threshold by its own name


def test_the_first_rule_that_matches_decides() -> None:
    text = """
    rules:
      - {name: small, match: {max_prompt_tokens: 100}, mode: aggregated}
      - {name: chat, match: {endpoint: /v1/chat/*, tenant: a*}, mode: disaggregated}
      - {name: model, match: {model: m}, mode: aggregated}
    """
    assert mode_of(text, Facts(model="m", prompt_tokens=50)) == ("local", "aggregated")
    chat = Facts(model="m", prompt_tokens=500, endpoint="/v1/chat/completions", tenant="acme")
    verdict = choose(parse_rules(text), chat)
    assert (verdict.mode, verdict.rule) == ("disaggregated", "chat")
    other = Facts(model="m", prompt_tokens=500, endpoint="/v1/chat/completions", tenant="b")
    assert choose(parse_rules(text), other).rule == "model"
    assert choose(parse_rules(text), Facts(model="n", prompt_tokens=500)).rule == ""


def test_a_rules_thresholds_stand_in_for_the_documents() -> None:
    text = """
    remote_prefill: {min_input_tokens: 100000}
    rules:
      - {name: r, match: {tenant: a}, remote_prefill: {min_input_tokens: 10}}
    """
    assert mode_of(text, Facts(tenant="a", prompt_tokens=50))[0] == ""
    assert mode_of(text, Facts(tenant="b", prompt_tokens=50))[0] == "local"


@given(st.text(max_size=20), st.floats(0.5, 99), st.floats(0.5, 99))
def test_a_canary_is_sticky_and_grows_without_losing_anybody(
    key: str, percent: float, other: float
) -> None:
    low, high = sorted((percent, other))
    text = "rules: [{{name: c, percent: {}, mode: aggregated}}]"
    facts = Facts(key=key, prompt_tokens=10)
    verdicts = [choose(parse_rules(text.format(p)), facts).mode for p in (low, low, high)]
    assert verdicts[0] == verdicts[1]
    assert not (verdicts[0] == "local" and verdicts[2] == "")


def test_a_canary_takes_about_its_share_and_rules_draw_independently() -> None:
    keys = [f"user-{i}" for i in range(4000)]
    taken = {key for key in keys if draw("c", key) < 10}
    assert 300 < len(taken) < 500
    both = [key for key in taken if draw("d", key) < 10]
    assert 15 < len(both) < 75


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("remote_prefil: {}", ["remote_prefil", "did you mean 'remote_prefill'?"]),
        ("remote_prefill: {min_input_token: 5}", ["did you mean 'min_input_tokens'?"]),
        ("rules: [{name: a, match: {tennant: x}}]", ["rules.0.match.tennant", "tenant"]),
        ("rules: [{name: a}, {name: a}]", ["two rules are named 'a'"]),
        ("rules: [{name: 'a b'}]", ["rules.0.name"]),
        ("rules: [{name: a, percent: 0}]", ["rules.0.percent"]),
        ("rules: [{name: a, mode: both}]", ["rules.0.mode", "aggregated"]),
        ("local_prefill: {min_prefix_hit: 2}", ["local_prefill.min_prefix_hit"]),
        ("remote_prefill: {min_input_tokens: '5'}", ["min_input_tokens"]),
        ("version: 2", ["version"]),
        ("[1, 2]", ["a mapping is expected"]),
        ("a: [", ["not valid YAML"]),
        ("mode: auto\nmode: aggregated", ["given twice"]),
        (
            "rules: [{name: a, match: {min_prompt_tokens: 5, max_prompt_tokens: 4}}]",
            ["nobody matches"],
        ),
    ],
)
def test_mistakes_are_named_with_the_nearest_valid_key(text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_rules(text, "file p.yaml")
    for word in ["file p.yaml", *words]:
        assert word in str(caught.value)


async def test_a_changed_file_is_read_again_and_a_wrong_one_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text("mode: aggregated")
    holder = RulesFile(path)
    await holder.load()
    assert holder.choose(LONG).mode == "local"
    path.write_text("mode: nonsense")
    os.utime(path, ns=(1, 1))
    await holder.reload_if_changed()
    assert holder.choose(LONG).mode == "local"
    assert "nonsense" in holder.error or "mode" in holder.error
    assert holder.counters["routing:refused"] == 1
    path.write_text("mode: disaggregated")
    os.utime(path, ns=(2, 2))
    await holder.reload_if_changed()
    assert (holder.choose(LONG).mode, holder.error) == ("disaggregated", "")
    with pytest.raises(ConfigError):
        await RulesFile(tmp_path / "absent.yaml").load()


def test_a_rollback_serves_everything_aggregated_until_it_ends() -> None:
    service = RulesService(RulesFile())
    service.change(m.RulesChange("replace", "mode: disaggregated"))
    assert service.change(m.RulesChange("rollback")).is_rolled_back
    assert service.rules.choose(LONG).reason == "rolled_back"
    # New rules are accepted, and apply after the rollback.
    assert service.change(m.RulesChange("replace", "mode: auto")).is_rolled_back
    assert service.rules.choose(LONG).mode == "local"
    assert not service.change(m.RulesChange("resume")).is_rolled_back
    assert service.rules.choose(LONG).mode == ""
    with pytest.raises(InvalidArgument):
        service.change(m.RulesChange("explode"))


def test_an_explanation_is_about_the_pool_as_it_is_and_counts_nothing() -> None:
    def worker(worker_id: str, role: str, queued: int, running: int) -> WorkerStatus:
        load = m.WorkerLoad(running, queued, 0, 0, 1000.0, 0.0, places=4)
        return WorkerStatus(worker_id, role, "h", b"n", load=load)

    dead = WorkerStatus("d", "prefill", "h", b"n", State.SUSPECT)
    workers = [worker("p", "prefill", 3000, 1), worker("q", "prefill", 2000, 1), dead]
    workers += [worker("r", "decode", 0, 3), worker("s", "decode", 0, 1)]
    inputs = SchedulingInputs({w.worker_id: w for w in workers}, {})
    facts = pool_facts(inputs, Facts(prompt_tokens=10))
    assert facts.queue_tokens == 2000
    assert facts.decode_pressure == 0.5
    assert 1 < facts.queue_wait_s < 10
    holder = RulesFile()
    holder.replace("fallback: {max_prefill_queue_tokens: 1999}")
    verdict = RulesService(holder).explain(m.RulesExplain(prompt_tokens=10), inputs)
    assert verdict.mode == "local"
    assert verdict.checks == [m.RulesCheck("fallback.max_prefill_queue_tokens", 2000, 1999, False)]
    assert "routing:local:fallback.max_prefill_queue_tokens" not in holder.counters
