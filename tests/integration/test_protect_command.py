"""`kvpool protect` and `unprotect` on a real pool: every way to name a prompt, and every refusal."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvpool import Pool, hash_chain
from kvpool.cli import app as cli
from tests.support.process_cluster import LAYOUT, NAMESPACE, Cluster

TEMPLATE = (
    "{% for message in messages %}{{ message.role }} {{ message.content }} end {% endfor %}answer"
)
SYSTEM = " ".join(f"w{i}" for i in range(70))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tokenizer of whole words and a chat template."""
    words = ["?", "a", "Z", "system", "user", "end", "answer", *SYSTEM.split()]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    directory = tmp_path_factory.mktemp("words")
    make: Any = PreTrainedTokenizerFast  # ships no types
    tokenizer = make(tokenizer_object=made, chat_template=TEMPLATE)
    tokenizer.save_pretrained(str(directory))
    return directory


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Cluster]:
    running = Cluster(tmp_path_factory.mktemp("protect"))
    with running.supervisor:
        running.start_conductor(model=str(model))
        running.start_node("n0")
        running.wait_joined(nodes=1)
        yield running


class Shell:
    """The command line, called within this process."""

    def __init__(self, cluster: Cluster, capture: pytest.CaptureFixture[str]) -> None:
        self._address = ("--conductor", cluster.conductor["wire"])
        self._capture = capture

    def run(self, *arguments: str, is_json: bool = True) -> tuple[int, str, str]:
        """Exit status, stdout and stderr."""
        status = 0
        with pytest.MonkeyPatch.context() as patch:
            form = ["--json"] if is_json else []
            patch.setattr(sys, "argv", ["kvpool", *arguments, *self._address, *form])
            try:
                cli.main()
            except SystemExit as exit_:
                status = int(exit_.code or 0)
        return status, *self._capture.readouterr()

    def count(self, command: str, *arguments: str) -> tuple[int, int]:
        """Blocks of the prompt, and how many of them are protected so now, or no longer."""
        status, out, err = self.run(command, *arguments)
        assert status == 0, err
        answer = json.loads(out)
        return answer["blocks"], sum(answer[f"{command}ed"].values())


@pytest.fixture
def shell(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(cluster, capsys)


def store(cluster: Cluster, tokens: list[int]) -> list[bytes]:
    hashes = hash_chain(NAMESPACE, tokens)
    with Pool(conductor=cluster.conductor["wire"], host_label="here") as pool:
        pool.put(NAMESPACE, hashes, np.zeros((len(hashes), LAYOUT.part_bytes), np.uint8))
    return hashes


def test_a_system_prompt_is_protected_as_conversations_begin_with_it(
    cluster: Cluster, shell: Shell
) -> None:
    # system + 70 words + end + user: two blocks of 32 tokens, then the conversation's own.
    with Pool(conductor=cluster.conductor["wire"]) as pool:
        begins = pool.tokenize(SYSTEM, is_system_prompt=True)
    assert len(begins) == 73
    store(cluster, [*begins, *range(40)])
    assert shell.count("protect", "--system", SYSTEM, "--ttl", "60") == (2, 2)
    assert shell.count("unprotect", "--system", SYSTEM) == (2, 2)
    assert shell.count("unprotect", "--system", SYSTEM) == (2, 0)


def test_a_prompt_is_named_by_text_ids_or_hashes(
    cluster: Cluster, shell: Shell, tmp_path: Path
) -> None:
    words = " ".join(SYSTEM.split()[5:70])
    with Pool(conductor=cluster.conductor["wire"]) as pool:
        tokens = pool.tokenize(words)
    hashes = store(cluster, tokens[:32])  # the second block is not in the pool
    assert shell.count("protect", "--text", words, "--model", NAMESPACE.model) == (2, 1)
    as_json, as_words = tmp_path / "ids.json", tmp_path / "ids.txt"
    as_json.write_text(json.dumps(tokens))
    as_words.write_text("\n".join(map(str, tokens)))
    assert shell.count("unprotect", "--tokens", str(as_json)) == (2, 1)
    assert shell.count("protect", "--tokens", str(as_words), "--model", NAMESPACE.name) == (2, 1)
    assert shell.count("unprotect", "--hash", hashes[0].hex()) == (1, 1)


def test_a_file_is_named_by_its_key(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(100_000))
    key = json.loads(shell.run("put", str(file))[1])["key"]
    assert shell.count("protect", key) == (2, 2)
    assert shell.count("unprotect", key) == (2, 2)


def test_what_names_no_prompt_is_refused(cluster: Cluster, shell: Shell, tmp_path: Path) -> None:
    tenants = [
        msgspec.structs.replace(NAMESPACE, model="tests/shared", tenant=tenant)
        for tenant in ("one", "other")
    ]
    with Pool(conductor=cluster.conductor["wire"]) as pool:
        pool.register(NAMESPACE)
    bad = tmp_path / "bad"
    bad.write_text("[1, x]")
    for arguments, says in (
        ((), "0 prompts"),
        (("--text", "a", "--hash", "00" * 16), "2 prompts"),
        (("--text", "a", "--model", NAMESPACE.model), "1 tokens"),
        (("--text", "a", "--model", "who"), "no blocks of model 'who'"),
        (("--hash", "00", "--model", NAMESPACE.model), "is not a block hash"),
        (("--tokens", str(bad), "--model", NAMESPACE.model), "does not hold token ids"),
        (("not-a-key",), "is not a key"),
    ):
        status, _, error = shell.run("protect", *arguments)
        assert status == 1
        assert says in error
    with Pool(conductor=cluster.conductor["wire"]) as pool:
        for space in tenants:
            pool.register(space)
    status, _, error = shell.run("protect", "--hash", "00" * 16, "--model", "tests/shared")
    assert status == 1
    assert all(space.name in error for space in tenants)
