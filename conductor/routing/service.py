"""Wire handlers for the routing rules."""

from __future__ import annotations

from conductor.routing.load_facts import pool_facts
from conductor.routing.rules import Facts
from conductor.routing.rules_file import RulesFile
from conductor.scheduling.inputs import SchedulingInputs
from kvpool.errors import InvalidArgument
from kvpool.wire import messages as m


class RulesService:
    """Handles the messages about the routing rules."""

    def __init__(self, rules: RulesFile) -> None:
        self.rules = rules

    def change(self, request: m.RulesChange) -> m.RulesReply:
        """Replace the rules, roll back, resume, or only return what is in force.

        Raises:
            ConfigError: the new rules are not valid.
            InvalidArgument: unknown action.
        """
        if request.action == "replace":
            self.rules.replace(request.text)
        elif request.action == "rollback":
            self.rules.rollback()
        elif request.action == "resume":
            self.rules.resume()
        elif request.action:
            raise InvalidArgument(
                f"unknown action {request.action!r}", hint="replace, rollback or resume"
            )
        return m.RulesReply(self.rules.text, self.rules.is_rolled_back, self.rules.error)

    def explain(self, request: m.RulesExplain, inputs: SchedulingInputs) -> m.RulesExplanation:
        """What the rules choose for such a request now. Counts nothing."""
        facts = pool_facts(
            inputs,
            Facts(
                model=request.model,
                tenant=request.tenant,
                endpoint=request.endpoint,
                key=request.key,
                prompt_tokens=request.prompt_tokens,
                found_tokens=request.found_tokens,
                output_tokens=request.output_tokens,
            ),
        )
        choice = self.rules.preview(facts)
        return m.RulesExplanation(
            choice.mode,
            choice.rule,
            choice.reason,
            [m.RulesCheck(c.what, c.value, c.threshold, c.holds) for c in choice.checks],
        )
