"""How pytest-xdist shares the tests out between its workers.

A worker gets one unit at a time: a file, or the tests of an engine, whose imports take long. So a module's
fixtures start once. Long units go first. The tests that load or measure the whole machine are one unit,
which starts when the other workers have finished.
"""

from __future__ import annotations

from typing import Any

from xdist.scheduler.loadscope import LoadScopeScheduling

ALONE = "alone"
_SERVERS_OF_VLLM = "vllm in processes of its own"
_FOLDERS = {
    "tests/chaos/": ALONE,
    "tests/engines/vllm/test_disaggregated.py": _SERVERS_OF_VLLM,
    "tests/engines/vllm/test_real_model.py": _SERVERS_OF_VLLM,
    "tests/engines/vllm/": "tests/engines/vllm/",
    "tests/engines/sglang/": "tests/engines/sglang/",
    "tests/engines/lmcache/": "tests/engines/lmcache/",
}
# Longest first, but not those together that compute on all cores; units that are not listed take less
# and follow in the order of their names.
_LONGEST = (
    "tests/integration/test_demo.py",
    _SERVERS_OF_VLLM,
    "tests/integration/test_replication.py",
    "tests/engines/vllm/",
    "tests/integration/test_failures.py",
    "tests/engines/lmcache/",
    "tests/integration/test_serving.py",
    "tests/architecture/test_wheels.py",
    "tests/integration/test_openai_client.py",
    "tests/conductor/engine_servers/test_engine_servers.py",
    "tests/integration/test_processes.py",
    "tests/engines/sglang/",
    "tests/integration/test_overload.py",
    "tests/integration/test_resize.py",
    "tests/workers/engine/test_engine.py",
    "tests/integration/test_conductors.py",
    "tests/integration/test_drain.py",
    "tests/integration/test_gateways.py",
    "tests/planner/replay/test_guarded_hazard.py",
    "tests/tiers/store/test_mutations.py",
    "tests/integration/test_stalls.py",
    "tests/tiers/store/test_properties.py",
)


def unit_of(test_id: str) -> str:
    """The unit that a test belongs to."""
    file = test_id.partition("::")[0]
    return next((unit for folder, unit in _FOLDERS.items() if file.startswith(folder)), file)


def order_of(test_id: str) -> int:
    """Sorts the tests so that long units come first and those that run alone come last."""
    unit = unit_of(test_id)
    if unit == ALONE:
        return len(_LONGEST) + 1
    return _LONGEST.index(unit) if unit in _LONGEST else len(_LONGEST)


class UnitScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Hands out units in the order of collection, and `ALONE` to the last worker that is left."""

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)

    def _only_alone_is_left(self) -> bool:
        return list(self.workqueue) == [ALONE]

    def _assign_work_unit(self, node: Any) -> None:
        if not self._only_alone_is_left() or len(self.assigned_work) == 1:
            super()._assign_work_unit(node)

    def _reschedule(self, node: Any) -> None:
        if node.shutting_down or not self._only_alone_is_left():
            super()._reschedule(node)
            return
        others = [other for other in self.assigned_work if other is not node]
        if self._pending_of(self.assigned_work[node]) > 2:
            return
        if not others:
            self._assign_work_unit(node)
        elif not all(other.shutting_down for other in others):
            node.shutdown()  # it finishes what it has; another worker takes what runs alone

    def remove_node(self, node: Any) -> str | None:
        crashed: str | None = super().remove_node(node)
        for left in list(self.assigned_work):
            if self._only_alone_is_left():
                self._reschedule(left)
        return crashed
