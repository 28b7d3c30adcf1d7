"""Counters and metrics are declared in one place, and the page on monitoring has them all."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path

import pytest

from kvpool.serving.counters import CONDUCTOR, NODE, WORKER, markdown

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "monitoring.md").read_text()
FAMILIES = {"CounterMetricFamily", "GaugeMetricFamily", "Counter", "Gauge", "Histogram"}


def trees(package: str) -> Iterator[ast.Module]:
    for file in sorted((ROOT / package).rglob("*.py")):
        yield ast.parse(file.read_text())


def given_to(tree: ast.Module, name: str) -> Iterator[ast.expr]:
    """What a variable may be: the values assigned to it, or the literals of a loop."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name) and target.id == name:
                    yield node.value
        elif (
            isinstance(node, ast.For)
            and isinstance(node.target, ast.Name)
            and node.target.id == name
            and isinstance(node.iter, ast.Tuple)
        ):
            yield from node.iter.elts


def texts(tree: ast.Module, value: ast.expr) -> set[str]:
    """The texts that an expression may be, with * for what only the running program knows."""
    if isinstance(value, ast.Constant):
        return {str(value.value)}
    if isinstance(value, ast.IfExp):
        return texts(tree, value.body) | texts(tree, value.orelse)
    if isinstance(value, ast.JoinedStr):
        parts = [texts(tree, part) for part in value.values]
        return {"".join(choice) for choice in product(*parts)}
    if isinstance(value, ast.FormattedValue):
        return texts(tree, value.value) or {"*"}
    if isinstance(value, ast.Name):
        return {text for given in given_to(tree, value.id) for text in texts(tree, given)}
    return set()


def counted(package: str) -> set[str]:
    """The names that a package counts: `...counters[NAME] += 1` and `self._count(NAME, 1)`."""
    names: set[str] = set()
    for tree in trees(package):
        for node in ast.walk(tree):
            if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Subscript):
                holder = ast.unparse(node.target.value)
                if holder.rpartition(".")[2].lstrip("_") == "counters":
                    names |= texts(tree, node.target.slice)
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "self._count":
                names |= texts(tree, node.args[0])
    return names


@pytest.mark.parametrize(
    ("package", "declared"), [("tiers", NODE), ("conductor", CONDUCTOR), ("workers", WORKER)]
)
def test_a_package_counts_what_is_declared_and_nothing_else(
    package: str, declared: dict[str, str]
) -> None:
    known = {re.sub(r"[A-Z]+", "*", name) for name in declared}
    names = counted(package)
    assert {n for n in names if not any(fnmatchcase(n, one) for one in known)} == set()
    source = "".join(file.read_text() for file in sorted((ROOT / package).rglob("*.py")))
    unused = {one for one in known if not any(fnmatchcase(n, one) for n in names)}
    assert {one for one in unused if f'"{one}"' not in source} == set()


def test_the_page_has_the_declared_counters() -> None:
    assert markdown() in PAGE, "print them again: python -m kvpool.serving.counters"


def metrics() -> list[str]:
    """Names of the servers' metrics as Prometheus shows them, once for each declaration."""
    names = []
    for package in ("kvpool/serving", "tiers", "conductor", "workers"):
        for tree in trees(package):
            for node in ast.walk(tree):
                if not (isinstance(node, ast.Call) and node.args):
                    continue
                family = ast.unparse(node.func)
                first = node.args[0]
                if family in FAMILIES and isinstance(first, ast.Constant):
                    is_counter = family in ("Counter", "CounterMetricFamily")
                    name = str(first.value)
                    names.append(f"{name}_total" if is_counter else name)
    return names


def test_every_metric_is_declared_once_and_on_the_page() -> None:
    names = metrics()
    assert len(names) == len(set(names))
    on_page = set(re.findall(r"^\| `(kvpool_\w+)", PAGE, re.MULTILINE))
    assert on_page == set(names)
