"""How the code is laid out: rooms, sizes, names, and settings that say what they are for.

A list of exceptions below only gets shorter: a test fails if an exception is not needed any more.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

from kvpool.config.settings import Settings, each_setting

ROOT = Path(__file__).parents[2]
PACKAGES = ("kvpool", "tiers", "conductor", "workers", "planner", "benchmarks")
MAX_LINES = 500
MAX_METHODS = 25
MAX_FUNCTION_LINES = 60  # without the docstring; of a command, also without its options

# Files over MAX_LINES: the most lines that each may have until it is split.
LONG_FILES: dict[str, int] = {}

# Classes over MAX_METHODS: the most methods that each may have until it is split.
LARGE_CLASSES: dict[str, int] = {}

# Classes whose methods an engine dictates. They stay.
DICTATED_BY_ENGINES = {
    "kvpool/engines/lmcache/connector.py::KVPoolConnector",
    "kvpool/engines/lmcache/l2_adapter.py::KVPoolL2Adapter",
    "kvpool/engines/sglang/storage.py::KVPoolStorage",
    "kvpool/engines/vllm/connector.py::KVPoolConnector",
}

# Words that the code no longer uses in names, with the words of the field that took their place.
RETIRED = {
    "judge": "SLO attainment",
    "entrance": "admission",
    "watches": "peer guard",
    "suspicions": "negative cache",
    "hot_answers": "lookup cache",
    "last_news": "block history",
    "prices": "disk wait",
    "boundary": "writeback",
    "golden": "known answer",
    "gate": "authorizer",
    "fleet": "supervisor",
    "book": "table",
    "cold_pins": "pending pins",
    "mover": "migrator",
    "lent": "tenant nodes",
    "losses": "failed arenas",
    "retirement": "evacuation",
    "residency": "block table",
    "slot_pool": "arena allocator",
    "ledger": "table",
    "stands": "resident",
    "standing": "resident",
}


@functools.cache
def sources() -> dict[str, str]:
    """The Python files of the product by path, without those that protoc wrote."""
    return {
        str(file.relative_to(ROOT)): file.read_text()
        for package in PACKAGES
        for file in sorted((ROOT / package).rglob("*.py"))
        if "_pb2" not in file.name
    }


@functools.cache
def trees() -> dict[str, ast.Module]:
    return {path: ast.parse(text) for path, text in sources().items()}


def methods(node: ast.ClassDef) -> list[str]:
    return [
        child.name
        for child in node.body
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def excess(sizes: dict[str, int], limit: int, allowed: dict[str, int]) -> dict[str, str]:
    """What is larger than it may be, and what needs no exception any more."""
    wrong = {
        name: f"{size}, at most {allowed.get(name, limit)}: split it"
        for name, size in sizes.items()
        if size > allowed.get(name, limit)
    }
    for name in allowed:
        if sizes.get(name, 0) <= limit:
            wrong[name] = f"remove this exception from {Path(__file__).name}: it is not needed"
    return wrong


def test_every_top_level_folder_of_code_is_known() -> None:
    folders = {
        file.parent.name
        for file in ROOT.glob("*/__init__.py")
        if file.parent.name != "tests" and not file.parent.name.startswith(".")
    }
    assert folders == set(PACKAGES)


def test_no_file_is_longer_than_a_reader_can_take_in() -> None:
    sizes = {path: text.count("\n") for path, text in sources().items()}
    assert excess(sizes, MAX_LINES, LONG_FILES) == {}


def test_no_class_has_more_methods_than_a_reader_can_take_in() -> None:
    sizes = {
        f"{path}::{node.name}": len(methods(node))
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    assert {name for name in DICTATED_BY_ENGINES if sizes.get(name, 0) <= MAX_METHODS} == set()
    others = {name: size for name, size in sizes.items() if name not in DICTATED_BY_ENGINES}
    assert excess(others, MAX_METHODS, LARGE_CLASSES) == {}


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef, *, is_command: bool) -> int:
    body = function.body[1:] if ast.get_docstring(function) else function.body
    if not body:
        return 0
    inside = (function.end_lineno or 0) - body[0].lineno + 1
    return inside if is_command else inside + function.body[0].lineno - function.lineno


def test_no_function_is_longer_than_a_screen() -> None:
    sizes = {
        f"{path}::{node.name}": code_lines(node, is_command="/cli/" in path)
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert excess(sizes, MAX_FUNCTION_LINES, {}) == {}


def names_given(tree: ast.Module) -> Iterator[str]:
    """Names that the file gives to classes, functions, arguments, attributes and variables."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


@functools.cache
def in_words(name: str) -> str:
    """`ReservationBook` and `_reservation_book` as `_reservation_book_`."""
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
    return f"_{snake.strip('_')}_"


def test_no_retired_word_comes_back() -> None:
    found = {
        f"{path}: {name}": f"say {instead}"
        for path, tree in trees().items()
        for name in {*Path(path).with_suffix("").parts, *names_given(tree)}
        for word, instead in RETIRED.items()
        if f"_{word}_" in in_words(name)
    }
    assert found == {}


@functools.cache
def texts() -> dict[str, str]:
    """The Python files of the product and of the tests by path."""
    tests = {
        str(file.relative_to(ROOT)): file.read_text() for file in (ROOT / "tests").rglob("*.py")
    }
    return sources() | tests


def exists(dotted: str) -> bool:
    """Whether `dotted` is a folder or module of this repository, or names that a module has."""
    parts = dotted.split(".")
    for count in range(len(parts), 0, -1):
        place = ROOT.joinpath(*parts[:count])
        files = [place.with_suffix(".py"), place / "__init__.py"]
        found = [texts()[name] for f in files if (name := str(f.relative_to(ROOT))) in texts()]
        if found:
            return all(re.search(rf"\b{part}\b", found[0]) for part in parts[count:])
    return False


def test_every_file_and_module_that_a_comment_or_docstring_names_exists() -> None:
    folders = "|".join((*PACKAGES, "tests"))
    keys = {key for key, _, _ in each_setting(Settings())}
    keys |= {".".join(key.split(".")[:count]) for key in keys for count in (1, 2)}
    keys |= {"kvpool.commands", "kvpool.yaml"}  # a group of entry points, and the settings file
    missing = []
    for path, text in texts().items():
        for dotted in re.findall(rf"`((?:{folders})\.\w[\w.]*\w)`", text):
            if dotted not in keys and not exists(dotted):
                missing.append(f"{path}: {dotted}")
        for file in re.findall(rf"`((?:{folders}|docs|deploy)/[\w./-]+\.\w+)`", text):
            if not (ROOT / file).exists():
                missing.append(f"{path}: {file}")
    assert missing == []


def test_every_setting_says_what_it_is_for() -> None:
    missing = [key for key, _, field in each_setting(Settings()) if not field.description]
    assert missing == []
