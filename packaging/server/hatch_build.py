"""Puts the packages of the repository's root into the wheel. An editable installation reads them where they are."""

from __future__ import annotations

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# `benchmarks` is here for `kvpool bench`: it measures a node and a client on the user's own machine.
PACKAGES = ("conductor", "tiers", "workers", "planner", "benchmarks")


class RootPackages(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version != "editable":
            build_data["force_include"] = {f"../../{name}": name for name in PACKAGES}
