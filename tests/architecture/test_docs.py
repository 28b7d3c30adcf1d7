"""The documentation names files, tests, commands, options and settings; each of them exists."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from pydantic import BaseModel
from typer.testing import CliRunner

from kvpool.cli.app import app
from kvpool.config.loader import load_settings
from kvpool.config.settings import Settings

ROOT = Path(__file__).parents[2]
NAMES = [
    *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").glob("*.md"))),
    *(name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md") if (ROOT / name).exists()),
]
PAGES = {name: (ROOT / name).read_text() for name in NAMES}
FOLDERS = "kvpool|tiers|conductor|workers|planner|benchmarks|tests|deploy|docs"
SECTIONS = "|".join(Settings.model_fields)

page = pytest.mark.parametrize("name", NAMES)


def without_code_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def code_blocks(text: str) -> list[str]:
    return [body for _, body in re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)]


@page
def test_every_file_that_a_page_names_exists(name: str) -> None:
    named = re.findall(rf"`((?:{FOLDERS})/[\w./-]*\w|(?:{FOLDERS})/)(?=[`:])", PAGES[name])
    assert [path for path in named if not (ROOT / path).exists()] == []


@page
def test_every_test_that_a_page_names_exists(name: str) -> None:
    missing = []
    for path, function in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGES[name]):
        file = ROOT / path
        tree = ast.parse(file.read_text() if file.exists() else "")
        if function not in {
            node.name
            for node in tree.body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }:
            missing.append(f"{path}::{function}")
    assert missing == []


@page
def test_every_module_that_a_page_runs_exists(name: str) -> None:
    modules = re.findall(r"python -m ((?:kvpool|benchmarks)[\w.]*)", PAGES[name])
    modules += re.findall(r"`(kvpool(?:\.\w+){2,})`", without_code_blocks(PAGES[name]))
    assert [module for module in modules if not names_something(module)] == []


def names_something(dotted: str) -> bool:
    """Whether `dotted` is a module, or a name that the module before its last dot defines."""
    parent, _, last = dotted.rpartition(".")
    if importlib.util.find_spec(dotted.split(".")[0]) is None:
        return False
    try:
        if importlib.util.find_spec(dotted) is not None:
            return True
    except ModuleNotFoundError:
        pass
    file = ROOT / parent.replace(".", "/")
    sources = [file.with_suffix(".py"), file / "__init__.py"]
    return any(re.search(rf"\b{last}\b", s.read_text()) for s in sources if s.exists())


@page
def test_every_link_leads_somewhere(name: str) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code_blocks(PAGES[name])):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / name).parent / path if path else ROOT / name
        if not file.exists() or (anchor and anchor not in anchors(file.read_text())):
            broken.append(target)
    assert broken == []


def anchors(text: str) -> set[str]:
    """The headings of a page as Markdown renderers name them."""
    headings = re.findall(r"^#+ (.*)$", without_code_blocks(text), re.MULTILINE)
    words = (re.sub(r"[^\w\s-]", "", heading.strip().lower()) for heading in headings)
    return {re.sub(r"\s", "-", heading) for heading in words}


def kvpool_commands(text: str) -> list[list[str]]:
    """The words behind `kvpool` of every such command in a page's code blocks."""
    found = []
    for block in code_blocks(text):
        for line in block.replace("\\\n", " ").splitlines():
            started = re.match(r"\s*(?:[A-Z_]+=\S+ )*kvpool ", line)
            if started is not None:
                words = shlex.split(line[started.end() :].replace("...", ""), comments=True)
                found.append([word for word in words if word != "&"])
    return found


@functools.cache
def help_of(words: tuple[str, ...]) -> str:
    result = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "250", "TERM": "dumb"})
    assert result.exit_code == 0, (words, result.output)
    return result.output


@functools.cache
def subcommands(words: tuple[str, ...]) -> frozenset[str]:
    """The commands that `kvpool WORDS` has of its own."""
    if not words:
        top: Any = typer.main.get_command(app)
        return frozenset(top.list_commands(None))
    section = help_of(words).partition("Commands")[2]
    return frozenset(re.findall(r"^[\s│]+([a-z][\w-]*)", section, re.MULTILINE))


@page
def test_every_command_and_option_in_a_code_block_exists(name: str) -> None:
    wrong = []
    for words in kvpool_commands(PAGES[name]):
        path: tuple[str, ...] = ()
        value_follows = False
        for word in words:
            if value_follows and not word.startswith("-"):
                value_follows = False
            elif word.startswith("-"):
                option = word.partition("=")[0]
                if not re.search(rf"(?<![\w-]){option}(?![\w-])", help_of(path)):
                    wrong.append(f"kvpool {' '.join((*path, word))}")
                value_follows = not path  # the global options all take a value
            elif word in subcommands(path):
                path += (word,)
            elif not path:
                wrong.append(f"kvpool {word}")
    assert wrong == []


@page
def test_every_command_in_a_sentence_exists(name: str) -> None:
    """As in `kvpool ls --model NAME`: the words up to the first that is no command, and the options."""
    wrong = []
    for text in re.findall(r"`kvpool ([^`]+)`", without_code_blocks(PAGES[name])):
        path: tuple[str, ...] = ()
        for word in text.split():
            if word in subcommands(path):
                path += (word,)
            elif not path and not word.startswith("-"):
                if not re.fullmatch(r"[A-Z]+|\.\.\.", word):
                    wrong.append(f"kvpool {text}")
                break
            elif word.startswith("--"):
                option = word.partition("=")[0]
                if not re.search(rf"(?<![\w-]){option}(?![\w-])", help_of(path)):
                    wrong.append(f"kvpool {text}")
    assert wrong == []


@page
def test_every_make_target_that_a_page_names_exists(name: str) -> None:
    rules = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = re.findall(r"`make ([\w-]+)", without_code_blocks(PAGES[name]))
    for block in code_blocks(PAGES[name]):
        named += re.findall(r"^\s*make ([\w-]+)", block, re.MULTILINE)
    assert set(named) - set(rules) == set()


@functools.cache
def literals() -> str:
    """Every text in the product's code, one per line; what an f-string inserts is left out."""
    texts = []
    for package in ("kvpool", "tiers", "conductor", "workers", "planner"):
        for source in sorted((ROOT / package).rglob("*.py")):
            if "_pb2" not in source.name:
                for node in ast.walk(ast.parse(source.read_text())):
                    if isinstance(node, ast.Constant) and isinstance(node.value, str):
                        texts.append(node.value)
    return "\n".join(texts)


@page
def test_every_metric_that_a_page_names_exists(name: str) -> None:
    named = re.findall(r"`(kvpool_(?!vllm_)[a-z_]+[a-z])(?:\{[^`]*\})?`", PAGES[name])
    # What Prometheus appends to the name of a counter.
    missing = [m for m in named if m.removesuffix("_total") not in literals()]
    assert missing == []


def test_every_message_that_the_page_on_troubleshooting_quotes_exists() -> None:
    rows = re.findall(r"^\| (.*?) \| ", PAGES["docs/troubleshooting.md"], re.MULTILINE)
    quoted = [text for row in rows for text in re.findall(r"`([^`]*? [^`]*)`", row)]
    assert len(quoted) > 10
    missing = []
    for text in quoted:
        # Dots and capitals are what the message names.
        pieces = [piece.strip(" ,()") for piece in re.split(r"\.{3}|\b[A-Z]{4,}\b:?", text)]
        if any(piece not in literals() for piece in pieces):
            missing.append(text)
    assert missing == []


def is_setting(dotted: str) -> bool:
    model: object = Settings
    for part in dotted.split("."):
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            return False
        if part not in model.model_fields:
            return False
        model = model.model_fields[part].annotation
    return True


@page
def test_every_setting_that_a_page_names_exists(name: str) -> None:
    named = re.findall(rf"`((?:{SECTIONS})\.[a-z0-9_.]+)[=:`]", PAGES[name])
    named += re.findall(rf"--set '?((?:{SECTIONS})\.[a-z0-9_.]+)=", PAGES[name])
    for section, key in re.findall(r"KVPOOL_([A-Z]+)__([A-Z0-9_]+)=", PAGES[name]):
        named.append(f"{section}.{key.replace('__', '.')}".lower())
    modules = {"kvpool", "tiers", "conductor", "workers"}
    unknown = [key for key in named if not is_setting(key)]
    assert [k for k in unknown if k.split(".")[0] not in modules or not names_something(k)] == []


@page
def test_every_configuration_that_a_page_shows_is_valid(name: str, tmp_path: Path) -> None:
    for text in re.findall(r"^```yaml\n(.*?)^```", PAGES[name], re.MULTILINE | re.DOTALL):
        content = yaml.safe_load(text)
        if isinstance(content, dict) and content.keys() <= Settings.model_fields.keys():
            file = tmp_path / "kvpool.yaml"
            file.write_text(text)
            load_settings(file, env={})


def test_the_site_has_every_page() -> None:
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    listed = [
        file for part in navigation for pages in part.values() for p in pages for file in p.values()
    ]
    assert sorted(f"docs/{file}" for file in listed) == [n for n in NAMES if n.startswith("docs/")]
