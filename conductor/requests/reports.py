"""What workers report of a request: values, as `PrefillReply` and `GenerateReply` carry them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True, frozen=True)
class PrefillReport:
    """A prefill worker's report. Phases in seconds, bytes by transport, reused tokens by tier.

    `fallback_reason` says why less was read than planned.
    """

    reused_tokens: int
    computed_tokens: int
    committed_blocks: int
    phases: Mapping[str, float] = field(default_factory=dict)
    bytes_read: Mapping[str, int] = field(default_factory=dict)
    bytes_written: Mapping[str, int] = field(default_factory=dict)
    fallback_reason: str = ""
    tokens_by_tier: Mapping[str, int] = field(default_factory=dict)


@dataclass(slots=True, frozen=True)
class DecodeReport:
    """A decode worker's report, units as in `PrefillReport`.

    `finish_reason` is "stop" or "length", and "" in a report before the end. `verified_blocks` are
    those whose checksum was compared after the read.
    """

    finish_reason: str
    pool_tokens: int
    local_tokens: int
    computed_tokens: int
    fallback_reason: str = ""
    phases: Mapping[str, float] = field(default_factory=dict)
    bytes_read: Mapping[str, int] = field(default_factory=dict)
    verified_blocks: int = 0
    bytes_written: Mapping[str, int] = field(default_factory=dict)
    tokens_by_tier: Mapping[str, int] = field(default_factory=dict)
