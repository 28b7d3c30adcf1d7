"""Routing rules: an operator decides which requests are served disaggregated and which aggregated.

The rules apply before the scheduler and narrow its choice to "local" (aggregated: the decode worker
prefills) or "disaggregated"; "" leaves the choice to cost. The rules are a YAML document, described
in docs/routing.md. A canary depends on the request's key only, so that equal keys are always
treated alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal, Self

import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kvpool.config.strict_yaml import parse_yaml
from kvpool.errors import ConfigError, did_you_mean

RoutingMode = Literal["", "local", "disaggregated"]
Tokens = Annotated[int, Field(ge=0, le=16_777_216)]
Share = Annotated[float, Field(ge=0, le=1)]
MAX_RULES = 256


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class RemotePrefillRules(_Part):
    """Conditions for a prefill on another worker. All must hold."""

    min_input_tokens: Tokens = Field(0, description="tokens left to compute after reuse")
    max_queue_wait_s: Annotated[float, Field(gt=0, le=3600)] | None = Field(
        None, description="predicted queue time of the least busy prefill worker"
    )
    min_output_tokens: Tokens = Field(0, description="expected output tokens")
    min_decode_pressure: Share = Field(
        0.0,
        description="share of the decode workers' slots in use; below it a local prefill delays"
        " few requests",
    )


class LocalPrefillRules(_Part):
    """Conditions under which the decode worker always prefills. One is enough."""

    max_input_tokens: Tokens = Field(0, description="prompts up to this length, reuse included")
    min_prefix_hit: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None, description="share of the prompt found in the pool"
    )


class FallbackRules(_Part):
    """When to give up a remote prefill."""

    transfer_timeout_s: Annotated[float, Field(gt=0, le=3600)] | None = Field(
        None,
        description="longest wait for the prefill and its blocks; then the decode worker prefills",
    )
    max_prefill_queue_tokens: Tokens | None = Field(
        None, description="prefill locally if every prefill worker has more tokens queued"
    )


class ObjectiveRules(_Part):
    """Objectives of the requests that a rule applies to, in seconds; 0: none."""

    ttft_s: Annotated[float, Field(ge=0, le=86_400)] | None = None
    tpot_s: Annotated[float, Field(ge=0, le=86_400)] | None = None


class Match(_Part):
    """Which requests a rule applies to. Every given field must match; texts may contain * and ?."""

    model: str | None = None
    tenant: str | None = None
    endpoint: str | None = Field(None, description="as /v1/chat/completions")
    min_prompt_tokens: Tokens = 0
    max_prompt_tokens: Tokens | None = None

    @model_validator(mode="after")
    def _range_is_not_empty(self) -> Self:
        if self.max_prompt_tokens is not None and self.max_prompt_tokens < self.min_prompt_tokens:
            raise ValueError("max_prompt_tokens is below min_prompt_tokens: nobody matches")
        return self


class Rule(_Part):
    """A rule. The first rule that matches a request and whose percentage includes it applies."""

    name: Annotated[str, Field(max_length=128, pattern=r"^[A-Za-z0-9_.-]+$")]
    match: Match = Match()
    percent: Annotated[float, Field(gt=0, le=100)] = Field(
        100.0,
        description="share of the matching requests, chosen by the hash of their key (sticky)",
    )
    mode: Literal["auto", "disaggregated", "aggregated"] = "auto"
    remote_prefill: RemotePrefillRules | None = Field(
        None, description="replaces the default of all rules"
    )
    local_prefill: LocalPrefillRules | None = None
    fallback: FallbackRules | None = None
    objectives: ObjectiveRules | None = None


class RoutingRules(_Part):
    """The whole document. An empty one leaves every request to cost.

    Raises:
        ValidationError: from pydantic. `parse_rules` raises a readable one.
    """

    version: Literal[1] = 1
    mode: Literal["auto", "disaggregated", "aggregated"] = Field(
        "auto", description="mode of the requests to which no rule applies"
    )
    remote_prefill: RemotePrefillRules = RemotePrefillRules()
    local_prefill: LocalPrefillRules = LocalPrefillRules()
    fallback: FallbackRules = FallbackRules()
    objectives: ObjectiveRules = ObjectiveRules()
    rules: tuple[Rule, ...] = Field((), max_length=MAX_RULES, strict=False)

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [rule.name for rule in self.rules]
        double = {name for name in names if names.count(name) > 1}
        if double:
            raise ValueError(f"two rules are named {sorted(double)[0]!r}")
        return self


@dataclass(slots=True, frozen=True)
class Facts:
    """What the rules may depend on: the request, and the load of the workers."""

    model: str = ""
    tenant: str = ""
    endpoint: str = ""
    key: str = ""  # a user or a conversation; equal keys are treated alike
    prompt_tokens: int = 0
    found_tokens: int = 0  # of the prompt, in the pool
    output_tokens: int = 0  # expected
    queue_wait_s: float = 0.0  # predicted, of the least busy prefill worker
    queue_tokens: int = 0  # queued at the prefill worker that has the fewest
    decode_pressure: float = 0.0  # share of the decode workers' slots in use


@dataclass(slots=True, frozen=True)
class ThresholdCheck:
    """One threshold, and whether it holds."""

    what: str
    value: float
    threshold: float
    holds: bool


@dataclass(slots=True, frozen=True)
class RoutingChoice:
    """What the rules choose for a request. `checks` are in the order in which they were made."""

    mode: RoutingMode
    rule: str  # "" if no rule applied
    reason: str
    transfer_timeout_s: float | None = None
    checks: tuple[ThresholdCheck, ...] = ()


def parse_rules(text: str, source: str = "the routing rules") -> RoutingRules:
    """Parse rules from YAML.

    Raises:
        ConfigError: names each unknown key with the nearest known one, and each wrong value with
            what is allowed.
    """
    document = parse_yaml(text, source)
    if document is None:
        return RoutingRules()
    if not isinstance(document, dict):
        raise ConfigError(f"{source}: a mapping is expected, not {type(document).__name__}")
    try:
        return RoutingRules.model_validate(document)
    except ValidationError as error:
        problems = [_problem(item) for item in error.errors(include_url=False)]
        raise ConfigError(f"{source}: " + "; ".join(problems)) from None


def objectives_of(rules: RoutingRules, facts: Facts) -> ObjectiveRules:
    """The objectives that the rules give a request. They depend on no load."""
    rule = _rule_for(rules, facts)
    return (rule and rule.objectives) or rules.objectives


def _rule_for(rules: RoutingRules, facts: Facts) -> Rule | None:
    return next((rule for rule in rules.rules if _applies(rule, facts)), None)


def choose(rules: RoutingRules, facts: Facts) -> RoutingChoice:
    """Apply the rules to a request."""
    rule = _rule_for(rules, facts)
    remote = (rule and rule.remote_prefill) or rules.remote_prefill
    local = (rule and rule.local_prefill) or rules.local_prefill
    fallback = (rule and rule.fallback) or rules.fallback
    name = rule.name if rule else ""
    mode = rule.mode if rule else rules.mode
    timeout_s = fallback.transfer_timeout_s
    if mode == "aggregated":
        return RoutingChoice("local", name, "aggregated", timeout_s)
    checks = list(_checks(remote, local, fallback, facts))
    failed = next((check for check in checks if not check.holds), None)
    if failed is not None and mode == "auto":
        return RoutingChoice("local", name, failed.what, timeout_s, tuple(checks))
    if mode == "disaggregated":
        return RoutingChoice("disaggregated", name, "disaggregated", timeout_s, tuple(checks))
    return RoutingChoice("", name, "cost", timeout_s, tuple(checks))


def _checks(
    remote: RemotePrefillRules, local: LocalPrefillRules, fallback: FallbackRules, facts: Facts
) -> list[ThresholdCheck]:
    """Every condition for a remote prefill. Thresholds that are not set are left out."""
    left = facts.prompt_tokens - facts.found_tokens
    hit = facts.found_tokens / facts.prompt_tokens if facts.prompt_tokens else 0.0
    checks = []

    def at_least(what: str, value: float, threshold: float) -> None:
        if threshold:
            checks.append(ThresholdCheck(what, value, threshold, value >= threshold))

    def at_most(what: str, value: float, threshold: float | None) -> None:
        if threshold is not None:
            checks.append(ThresholdCheck(what, value, threshold, value <= threshold))

    if local.max_input_tokens:
        longer = facts.prompt_tokens > local.max_input_tokens
        checks.append(
            ThresholdCheck(
                "local_prefill.max_input_tokens",
                facts.prompt_tokens,
                local.max_input_tokens,
                longer,
            )
        )
    if local.min_prefix_hit is not None:
        rarer = hit < local.min_prefix_hit
        checks.append(
            ThresholdCheck("local_prefill.min_prefix_hit", hit, local.min_prefix_hit, rarer)
        )
    at_least("remote_prefill.min_input_tokens", left, remote.min_input_tokens)
    at_least("remote_prefill.min_output_tokens", facts.output_tokens, remote.min_output_tokens)
    at_least(
        "remote_prefill.min_decode_pressure", facts.decode_pressure, remote.min_decode_pressure
    )
    at_most("remote_prefill.max_queue_wait_s", facts.queue_wait_s, remote.max_queue_wait_s)
    at_most(
        "fallback.max_prefill_queue_tokens", facts.queue_tokens, fallback.max_prefill_queue_tokens
    )
    return checks


def _applies(rule: Rule, facts: Facts) -> bool:
    match = rule.match
    for pattern, value in (
        (match.model, facts.model),
        (match.tenant, facts.tenant),
        (match.endpoint, facts.endpoint),
    ):
        if pattern is not None and not fnmatchcase(value, pattern):
            return False
    most = match.max_prompt_tokens
    if facts.prompt_tokens < match.min_prompt_tokens:
        return False
    if most is not None and facts.prompt_tokens > most:
        return False
    return rule.percent >= 100 or draw(rule.name, facts.key) < rule.percent


def draw(rule: str, key: str) -> float:
    """A fixed number in [0, 100) for a rule and a key, so that a canary is sticky.

    The numbers of two rules are independent. Raising a percentage keeps every key that it had.
    """
    return xxhash.xxh3_64_intdigest(f"{rule}\0{key}".encode()) / 2**64 * 100


def _problem(item: Mapping[str, Any]) -> str:
    path = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        known = _known_keys(item["loc"][:-1])
        return f"unknown key {path} ({did_you_mean(item['loc'][-1], known)})"
    reason = str(item["msg"]).removeprefix("Value error, ")
    return f"{path or 'document'}: {reason}"


def _known_keys(path: tuple[Any, ...]) -> list[str]:
    """The keys allowed at `path`."""
    parts: dict[str, type[_Part]] = {
        "rules": Rule,
        "match": Match,
        "remote_prefill": RemotePrefillRules,
        "local_prefill": LocalPrefillRules,
        "fallback": FallbackRules,
        "objectives": ObjectiveRules,
    }
    names = [part for part in path if isinstance(part, str)]
    return list((parts[names[-1]] if names else RoutingRules).model_fields)
