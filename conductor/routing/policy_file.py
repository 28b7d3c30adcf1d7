"""The routing policy in force: replaced whole, rolled back by one command, re-read when its file changes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import structlog

from conductor.routing.policy import Facts, RoutingPolicy, Verdict, decide, parse_policy
from kvpool.errors import ConfigError

log = structlog.get_logger(__name__)


class PolicyHolder:
    """Keeps the last policy that was right; requests in work keep the verdict that they got.

    Args:
        path: YAML file that is read now, and again when it changes; None: an empty policy.
        counters: where events are counted.

    Raises:
        ConfigError: the file cannot be read, or holds no valid policy.
    """

    def __init__(self, path: Path | None = None, counters: Counter[str] | None = None) -> None:
        self.counters: Counter[str] = Counter() if counters is None else counters
        self.policy = RoutingPolicy()
        self.text = ""
        self.error = ""  # why the file's present content is not in force
        self.is_rolled_back = False
        self._path = path
        self._seen: tuple[int, int] | None = None
        if path is not None:
            self._seen = _stamp(path)
            self.replace(_read(path), f"file {path}")

    def replace(self, text: str, source: str = "the policy") -> None:
        """Put another policy in force. Ends no rollback.

        Raises:
            ConfigError: it is not valid; the old one stays.
        """
        policy = parse_policy(text, source)
        self.policy, self.text, self.error = policy, text, ""
        self.counters["policy:replaced"] += 1

    def reload_if_changed(self) -> None:
        """Read the file again when it changed; what is not valid is logged once, and the old one stays."""
        if self._path is None:
            return
        stamp = _stamp(self._path)
        if stamp == self._seen:
            return
        self._seen = stamp
        try:
            self.replace(_read(self._path), f"file {self._path}")
        except ConfigError as error:
            self.error = str(error)
            self.counters["policy:refused"] += 1
            log.error("the changed policy is not in force", error=str(error))
        else:
            log.info("policy reloaded", path=str(self._path), rules=len(self.policy.rules))

    def rollback(self) -> None:
        """Serve everything aggregated from now on, whatever the policy says."""
        self.is_rolled_back = True
        self.counters["policy:rollbacks"] += 1
        log.warning("rolled back to aggregated serving")

    def resume(self) -> None:
        """Let the policy decide again."""
        self.is_rolled_back = False
        log.info("the policy decides again")

    def say(self, facts: Facts) -> Verdict:
        """What is in force for a request."""
        if self.is_rolled_back:
            return Verdict("local", "", "rolled_back")
        return decide(self.policy, facts)

    def decide(self, facts: Facts) -> Verdict:
        """What is in force for a request, counted."""
        verdict = self.say(facts)
        if verdict.mode == "local":
            self.counters[f"policy:local:{verdict.reason}"] += 1
        if verdict.rule:
            self.counters[f"policy:rule:{verdict.rule}"] += 1
        return verdict


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot read the policy {path}: {error}", hint="see conductor.policy_path"
        ) from None
