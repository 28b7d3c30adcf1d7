"""Who is served disaggregated and who is not: the policy that an operator writes, and what follows for a request.

It comes before the scheduler and narrows its choice: "local" (aggregated: the decode worker prefills),
"disaggregated", or "" (by cost). A YAML document; see docs/policy.md. Pure: no I/O, no clock, and a canary's
draw depends on the request's key alone.
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

Mode = Literal["", "local", "disaggregated"]
Tokens = Annotated[int, Field(ge=0, le=16_777_216)]
Share = Annotated[float, Field(ge=0, le=1)]
MAX_RULES = 256


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class RemotePrefill(_Part):
    """When a prefill elsewhere is allowed: all of these must hold."""

    min_input_tokens: Tokens = Field(0, description="left to compute, after reuse")
    max_queue_wait_s: Annotated[float, Field(gt=0, le=3600)] | None = Field(
        None, description="of the least busy prefill worker, predicted"
    )
    min_output_tokens: Tokens = Field(0, description="expected")
    min_decode_pressure: Share = Field(
        0.0,
        description="share of the decode workers' places taken; below it local prefill disturbs few",
    )


class LocalPrefill(_Part):
    """When the decode worker prefills in any case: one of these suffices."""

    max_input_tokens: Tokens = Field(0, description="prompts up to this length, reuse included")
    min_prefix_hit: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None, description="share of the prompt found in the pool"
    )


class Fallback(_Part):
    """When to give a remote prefill up."""

    transfer_timeout_s: Annotated[float, Field(gt=0, le=3600)] | None = Field(
        None, description="longest wait for it and its blocks, before the decode worker computes"
    )
    max_prefill_queue_tokens: Tokens | None = Field(
        None, description="waiting at every prefill worker: with more, prefill locally"
    )


class Match(_Part):
    """Whom a rule is for: every field given must match. Texts may have * and ?."""

    model: str | None = None
    tenant: str | None = None
    endpoint: str | None = Field(None, description="as /v1/chat/completions")
    min_prompt_tokens: Tokens = 0
    max_prompt_tokens: Tokens | None = None

    @model_validator(mode="after")
    def _has_a_span(self) -> Self:
        if self.max_prompt_tokens is not None and self.max_prompt_tokens < self.min_prompt_tokens:
            raise ValueError("max_prompt_tokens is below min_prompt_tokens: nobody matches")
        return self


class Rule(_Part):
    """The first rule that matches a request, and whose percentage takes it, decides for it."""

    name: Annotated[str, Field(max_length=128, pattern=r"^[A-Za-z0-9_.-]+$")]
    match: Match = Match()
    percent: Annotated[float, Field(gt=0, le=100)] = Field(
        100.0, description="of the requests that match, by the hash of their key: sticky"
    )
    mode: Literal["auto", "disaggregated", "aggregated"] = "auto"
    remote_prefill: RemotePrefill | None = Field(None, description="instead of the policy's")
    local_prefill: LocalPrefill | None = None
    fallback: Fallback | None = None


class RoutingPolicy(_Part):
    """The whole document. Empty: everything by cost.

    Raises:
        ValidationError (from pydantic): see `parse_policy` for one that people can read.
    """

    version: Literal[1] = 1
    mode: Literal["auto", "disaggregated", "aggregated"] = Field(
        "auto", description="of requests that no rule takes"
    )
    remote_prefill: RemotePrefill = RemotePrefill()
    local_prefill: LocalPrefill = LocalPrefill()
    fallback: Fallback = Fallback()
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
    """What a decision may depend on."""

    model: str = ""
    tenant: str = ""
    endpoint: str = ""
    key: str = ""  # requests with equal keys are treated alike (a user or a conversation)
    prompt_tokens: int = 0
    found_tokens: int = 0  # of the prompt, in the pool
    output_tokens: int = 0  # expected
    queue_wait_s: float = 0.0  # of the least busy prefill worker
    queue_tokens: int = 0  # waiting at the prefill worker with the fewest
    decode_pressure: float = 0.0  # share of the decode workers' places that are taken


@dataclass(slots=True, frozen=True)
class Check:
    """One threshold as it was applied."""

    what: str
    value: float
    threshold: float
    holds: bool


@dataclass(slots=True, frozen=True)
class Verdict:
    """What the policy says of a request; `checks` in the order in which they were made."""

    mode: Mode
    rule: str  # "" when none took it
    reason: str
    transfer_timeout_s: float | None = None
    checks: tuple[Check, ...] = ()


def parse_policy(text: str, source: str = "the policy") -> RoutingPolicy:
    """A policy from YAML.

    Raises:
        ConfigError: names each wrong key with the nearest known one, each wrong value with what is allowed.
    """
    document = parse_yaml(text, source)
    if document is None:
        return RoutingPolicy()
    if not isinstance(document, dict):
        raise ConfigError(f"{source}: a mapping is expected, not {type(document).__name__}")
    try:
        return RoutingPolicy.model_validate(document)
    except ValidationError as error:
        problems = [_problem(item) for item in error.errors(include_url=False)]
        raise ConfigError(f"{source}: " + "; ".join(problems)) from None


def decide(policy: RoutingPolicy, facts: Facts) -> Verdict:
    """What `policy` says of a request."""
    rule = next((rule for rule in policy.rules if _takes(rule, facts)), None)
    remote = (rule and rule.remote_prefill) or policy.remote_prefill
    local = (rule and rule.local_prefill) or policy.local_prefill
    fallback = (rule and rule.fallback) or policy.fallback
    name = rule.name if rule else ""
    mode = rule.mode if rule else policy.mode
    timeout_s = fallback.transfer_timeout_s
    if mode == "aggregated":
        return Verdict("local", name, "aggregated", timeout_s)
    checks = list(_checks(remote, local, fallback, facts))
    failed = next((check for check in checks if not check.holds), None)
    if failed is not None and mode == "auto":
        return Verdict("local", name, failed.what, timeout_s, tuple(checks))
    if mode == "disaggregated":
        return Verdict("disaggregated", name, "disaggregated", timeout_s, tuple(checks))
    return Verdict("", name, "cost", timeout_s, tuple(checks))


def _checks(
    remote: RemotePrefill, local: LocalPrefill, fallback: Fallback, facts: Facts
) -> list[Check]:
    """Everything that must hold for a remote prefill; thresholds that are not set are left out."""
    left = facts.prompt_tokens - facts.found_tokens
    hit = facts.found_tokens / facts.prompt_tokens if facts.prompt_tokens else 0.0
    checks = []

    def at_least(what: str, value: float, threshold: float) -> None:
        if threshold:
            checks.append(Check(what, value, threshold, value >= threshold))

    def at_most(what: str, value: float, threshold: float | None) -> None:
        if threshold is not None:
            checks.append(Check(what, value, threshold, value <= threshold))

    if local.max_input_tokens:
        longer = facts.prompt_tokens > local.max_input_tokens
        checks.append(
            Check(
                "local_prefill.max_input_tokens",
                facts.prompt_tokens,
                local.max_input_tokens,
                longer,
            )
        )
    if local.min_prefix_hit is not None:
        rarer = hit < local.min_prefix_hit
        checks.append(Check("local_prefill.min_prefix_hit", hit, local.min_prefix_hit, rarer))
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


def _takes(rule: Rule, facts: Facts) -> bool:
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
    """Where a key stands in [0, 100) for a rule: a fixed number, so that a canary is sticky.

    Two rules draw independently, and raising a percentage keeps whom it had.
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
    """The keys that the part at `path` may have."""
    parts: dict[str, type[_Part]] = {
        "rules": Rule,
        "match": Match,
        "remote_prefill": RemotePrefill,
        "local_prefill": LocalPrefill,
        "fallback": Fallback,
    }
    names = [part for part in path if isinstance(part, str)]
    return list((parts[names[-1]] if names else RoutingPolicy).model_fields)
