"""What a model's revision depends on, and when it is cached."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kvpool.blocks import model_revision
from kvpool.blocks.model_revision import model_directory, revision_of
from kvpool.errors import ModelNotFound
from tests.support.tiny_model import save_tiny_llama


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


def copy_of(model: Path, to: Path) -> Path:
    to.mkdir()
    for file in model.iterdir():
        if not file.name.startswith("."):
            (to / file.name).write_bytes(file.read_bytes())
    return to


def test_revision_is_of_the_content_not_of_place_or_time(tiny: Path, tmp_path: Path) -> None:
    copy = copy_of(tiny, tmp_path / "another-name")
    assert revision_of(copy) == revision_of(tiny)
    assert len(revision_of(copy)) == 64


def test_revision_ignores_who_saved_the_config_and_heeds_the_rest(
    tiny: Path, tmp_path: Path
) -> None:
    before = revision_of(tiny)
    copy = copy_of(tiny, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    config |= {"transformers_version": "9.9", "_name_or_path": "/elsewhere"}
    (copy / "config.json").write_text(json.dumps(config))
    assert revision_of(copy) == before
    config["rms_norm_eps"] = 1e-3
    (copy / "config.json").write_text(json.dumps(config))
    assert revision_of(copy) != before


def test_one_changed_byte_of_the_weights_is_another_revision(tiny: Path, tmp_path: Path) -> None:
    copy = copy_of(tiny, tmp_path / "copy")
    before = revision_of(copy)
    weights = copy / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert revision_of(copy) != before


@pytest.mark.parametrize("place", [20, -1])
def test_large_files_count_by_size_header_and_samples(
    place: int, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_revision, "_WHOLE_FILE_BYTES", 1000)
    monkeypatch.setattr(model_revision, "_SAMPLE_BYTES", 64)
    copy = copy_of(tiny, tmp_path / "copy")
    weights = copy / "model.safetensors"
    content = bytearray(weights.read_bytes())
    before = revision_of(copy)
    content[place] ^= 1
    weights.write_bytes(content)
    changed = revision_of(copy)
    content[place] ^= 1
    weights.write_bytes(content + b"\0")
    assert len({before, changed, revision_of(copy)}) == 3


def test_revision_is_remembered_until_a_file_changes(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = copy_of(tiny, tmp_path / "copy")
    reads: list[Path] = []
    digest = model_revision.file_digest

    def counted(file: Path) -> bytes:
        reads.append(file)
        return digest(file)

    monkeypatch.setattr(model_revision, "file_digest", counted)
    for file in copy.iterdir():
        os.utime(file, ns=(1, 1))
    first = revision_of(copy)
    assert revision_of(copy) == first
    assert len(reads) == 1
    os.utime(copy / "model.safetensors", ns=(2, 2))
    assert revision_of(copy) == first
    assert len(reads) == 2
    (copy / ".kvpool-revision.json").write_text("spoilt")
    assert revision_of(copy) == first
    assert len(reads) == 3


def test_revision_of_files_written_just_now_is_not_remembered(tiny: Path, tmp_path: Path) -> None:
    copy = copy_of(tiny, tmp_path / "copy")
    weights = copy / "model.safetensors"
    stamp = weights.stat().st_mtime_ns
    before = revision_of(copy)
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    os.utime(weights, ns=(stamp, stamp))  # the same tick of the file system's clock
    assert revision_of(copy) != before


def test_revision_needs_config_and_weights(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        revision_of(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelNotFound, match="safetensors"):
        revision_of(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelNotFound, match="not a JSON object"):
        revision_of(tmp_path)


def test_model_is_found_as_a_directory_or_by_its_name_in_the_cache(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = tmp_path / "models--tests--tiny"
    (repo / "snapshots").mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("c0ffee")
    snapshot = copy_of(tiny, repo / "snapshots" / "c0ffee")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))

    assert model_directory(str(tiny)) == tiny
    assert model_directory("tests/tiny") == snapshot
    assert revision_of(model_directory("tests/tiny")) == revision_of(tiny)
    for missing in ("tests/other", "", str(tmp_path)):
        with pytest.raises(ModelNotFound, match="no files of the model"):
            model_directory(missing)
