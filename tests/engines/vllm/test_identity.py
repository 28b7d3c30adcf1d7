"""Whatever changes KV changes its name, and nothing else does, by vLLM's own configuration."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, ParallelConfig, VllmConfig
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from kvpool.blocks.hashing import hash_chain
from kvpool.blocks.layout import Namespace
from kvpool.engines.vllm import lora
from kvpool.engines.vllm.identity import (
    LayoutFacts,
    attention_backends,
    extra_keys,
    lora_traits,
    model_identity,
    namespace_of,
)
from kvpool.engines.vllm.lora import LoraVersions
from kvpool.engines.vllm.settings import read
from kvpool.errors import ModelNotFound
from tests.engines.vllm.harness import HF_CONFIG, write_model

pytestmark = pytest.mark.vllm
FACTS = LayoutFacts("vllm-1:test", "bfloat16", 16, 3 * 2 * 2 * 16 * 16 * 2, 3, 2, 16, 2)
EXTRA = {"conductor": "127.0.0.1:7800"}


def vllm_config(model: Path, **options: Any) -> VllmConfig:
    options = {"dtype": "bfloat16", "max_model_len": 1024, "skip_tokenizer_init": True} | options
    return VllmConfig(
        model_config=ModelConfig(model=str(model), **options),
        cache_config=CacheConfig(block_size=16),
        parallel_config=ParallelConfig(),
        device_config=DeviceConfig("cpu"),
    )


def namespace(config: VllmConfig, facts: LayoutFacts = FACTS, **extra: Any) -> Namespace:
    settings = read(EXTRA | extra)
    return namespace_of(model_identity(config, settings.revision), facts, settings)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("a") / "tiny")


def test_the_same_files_elsewhere_and_other_weights_under_the_same_name(
    model: Path, tmp_path: Path
) -> None:
    ours = namespace(vllm_config(model))
    same = namespace(vllm_config(write_model(tmp_path / "b" / "tiny")))
    assert same.namespace_id == ours.namespace_id
    other_model = write_model(tmp_path / "c" / "tiny")
    (other_model / "model.safetensors").write_bytes(b"\x03\0\0\0\0\0\0\0{ }")
    other = namespace(vllm_config(other_model))
    assert (other.model, other.layout) == (ours.model, ours.layout)
    assert other.namespace_id != ours.namespace_id


OPTIONS: dict[str, dict[str, Any]] = {
    "dtype": {"dtype": "float32"},
    "configuration from the command line": {"hf_overrides": {"rope_theta": 5e5}},
    "a sliding window that is not used": {"disable_sliding_window": True},
    "scaled rotary embeddings": {
        "hf_overrides": {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 2.0,
                "original_max_position_embeddings": 512,
            }
        }
    },
}


@pytest.mark.parametrize("option", OPTIONS)
def test_what_the_model_is_run_with_is_in_the_namespace(model: Path, option: str) -> None:
    ours = namespace(vllm_config(model))
    assert namespace(vllm_config(model, **OPTIONS[option])).namespace_id != ours.namespace_id


CHANGES: dict[str, Callable[[VllmConfig], None]] = {
    "KV dtype": lambda c: setattr(c.cache_config, "cache_dtype", "fp8_e5m2"),
    "quantization": lambda c: setattr(c.model_config, "quantization", "fp8"),
    "tensor parallelism": lambda c: setattr(c.parallel_config, "tensor_parallel_size", 2),
    "dummy weights": lambda c: setattr(c.load_config, "load_format", "dummy"),
    "media": lambda c: setattr(
        c.model_config, "multimodal_config", SimpleNamespace(mm_processor_kwargs={"crops": 4})
    ),
    "a drafter with KV": lambda c: setattr(
        c,
        "speculative_config",
        SimpleNamespace(
            method="mtp",
            kv_cache_dtype=None,
            draft_model_config=c.model_config,
            target_model_config=c.model_config,
        ),
    ),
}
HARMLESS: dict[str, Callable[[VllmConfig], None]] = {
    "memory": lambda c: setattr(c.cache_config, "gpu_memory_utilization", 0.5),
    "batching": lambda c: setattr(c.scheduler_config, "max_num_batched_tokens", 512),
    "data parallelism": lambda c: setattr(c.parallel_config, "data_parallel_size", 4),
    "a drafter without KV": lambda c: setattr(
        c, "speculative_config", SimpleNamespace(method="ngram")
    ),
    "the longest sequence, unless embeddings scale with it": lambda c: setattr(
        c.model_config, "max_model_len", 512
    ),
}


def changed(config: VllmConfig, change: Callable[[VllmConfig], None]) -> VllmConfig:
    changed = copy.copy(config)
    for name in ("model_config", "cache_config", "parallel_config", "load_config"):
        setattr(changed, name, copy.copy(getattr(config, name)))
    change(changed)
    return changed


def test_every_setting_that_changes_kv_changes_the_namespace_and_no_other(model: Path) -> None:
    config = vllm_config(model)
    ours = namespace(config).namespace_id
    for name, change in CHANGES.items():
        assert namespace(changed(config, change)).namespace_id != ours, name
    for name, change in HARMLESS.items():
        assert namespace(changed(config, change)).namespace_id == ours, name
    scaled = vllm_config(model, **OPTIONS["scaled rotary embeddings"])
    longer = changed(scaled, HARMLESS["the longest sequence, unless embeddings scale with it"])
    assert namespace(scaled).namespace_id != namespace(longer).namespace_id


def test_layout_tenant_salt_and_block_size_are_in_the_namespace(model: Path) -> None:
    config = vllm_config(model)
    seen = {
        namespace(config, facts, **extra).namespace_id
        for facts, extra in (
            (FACTS, {}),
            (LayoutFacts("vllm-1:other", *FACTS.__reduce__()[1][1:]), {}),
            (FACTS, {"tenant": "a"}),
            (FACTS, {"salt": "a"}),
            (FACTS, {"block_tokens": 128}),
            (FACTS, {"revision": "mine"}),
            (FACTS, {"hash_algorithm": "sha256"}),
        )
    }
    assert len(seen) == 7


def test_weights_that_are_not_here_need_a_revision_from_the_user(
    model: Path, tmp_path: Path
) -> None:
    config = vllm_config(write_model(tmp_path / "gone"))
    (tmp_path / "gone" / "model.safetensors").unlink()
    with pytest.raises(ModelNotFound):
        namespace(config)
    assert namespace(config, revision="v7").revision.startswith("v7+vllm.")


def test_backends_are_named_once_and_in_order() -> None:
    layers = [SimpleNamespace(get_attn_backend=lambda n=n: SimpleNamespace(get_name=lambda: n))
              for n in ("TRITON", "FLASH", "TRITON")]  # fmt: skip
    context = dict(enumerate([*layers, object()]))
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=context))
    assert attention_backends(config) == "FLASH,TRITON"


PROGRAM = """
import sys
from pathlib import Path
from tests.engines.vllm.test_identity import FACTS, namespace, vllm_config
from kvpool.blocks.hashing import hash_chain
ours = namespace(vllm_config(Path(sys.argv[1])))
print("=", ours.namespace_id.hex(), hash_chain(ours, list(range(128)), ("lora:a",))[-1].hex())
"""


def test_processes_started_apart_agree_whatever_their_hash_seed(model: Path) -> None:
    running = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(model)],
            env=os.environ | {"PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    said = [process.communicate(timeout=600)[0] for process in running]
    lines = [[line for line in text.splitlines() if line.startswith("=")] for text in said]
    assert lines[0]
    assert lines[0] == lines[1]


# ------------------------------------------------------------ requests


@pytest.fixture
def loras() -> Iterator[LoraVersions]:
    versions = LoraVersions("bfloat16")
    yield versions
    versions.close()


def request(**options: Any) -> Request:
    return Request(
        request_id="r",
        prompt_token_ids=options.pop("prompt_token_ids", list(range(64))),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        **options,
    )


def adapter(directory: Path, content: bytes = b"weights") -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps({"r": 8}))
    (directory / "adapter_model.safetensors").write_bytes(
        len(content).to_bytes(8, "little") + content
    )
    return directory


def keys(request: Request, loras: LoraVersions) -> tuple[str, ...] | None:
    return extra_keys(request, loras, wait_s=10.0)


def picture(offset: int, digest: str = "a" * 64, length: int = 8) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(
        data=None, modality="image", identifier=digest, mm_position=PlaceholderRange(offset, length)
    )


def test_each_thing_that_a_requests_kv_depends_on_gives_other_keys(
    tmp_path: Path, loras: LoraVersions
) -> None:
    requests = [
        request(),
        request(cache_salt="tenant a"),
        request(cache_salt="tenant b"),
        request(lora_request=LoRARequest("sql", 1, str(adapter(tmp_path / "a")))),
        request(lora_request=LoRARequest("sql", 2, str(adapter(tmp_path / "b", b"other weights")))),
        request(lora_request=LoRARequest("chat", 3, str(adapter(tmp_path / "a")))),
        request(mm_features=[picture(4)]),
        request(mm_features=[picture(5)]),
        request(mm_features=[picture(4, length=9)]),
        request(mm_features=[picture(4, "b" * 64)]),
        request(mm_features=[picture(4), picture(20)]),
        request(mm_features=[picture(4)], cache_salt="tenant a"),
    ]
    found = [keys(one, loras) for one in requests]
    assert None not in found
    assert len(set(found)) == len(requests)
    assert found[0] == ()


def test_one_salt_cannot_pass_for_another_kind_of_key(loras: LoraVersions, model: Path) -> None:
    ours = namespace(vllm_config(model))
    salted = keys(request(cache_salt="x"), loras)
    plain = keys(request(), loras)
    assert salted is not None
    assert plain is not None
    assert hash_chain(ours, range(64), salted) != hash_chain(ours, range(64), plain)
    assert all(key.split(":", 1)[0] in ("lora", "cache_salt", "mm") for key in salted)


def test_what_cannot_be_named_by_its_content_is_shared_with_nobody(
    tmp_path: Path, loras: LoraVersions
) -> None:
    assert keys(request(prompt_embeds=torch.zeros(8, 4), prompt_token_ids=None), loras) is None
    assert keys(request(mm_features=[picture(4, "my-picture")]), loras) is None
    missing = LoRARequest("gone", 1, str(tmp_path / "nowhere"))
    assert keys(request(lora_request=missing), loras) is None
    inplace = LoRARequest("rl", 2, str(adapter(tmp_path / "rl")), load_inplace=True)
    assert keys(request(lora_request=inplace), loras) is None
    inplace.load_inplace = False
    assert keys(request(lora_request=inplace), loras) is None  # which of the two is loaded?


def test_an_adapter_that_changed_on_disk_is_shared_with_nobody_until_it_is_registered_anew(
    tmp_path: Path, loras: LoraVersions
) -> None:
    path = adapter(tmp_path / "a")
    old = LoRARequest("sql", 1, str(path))
    first = keys(request(lora_request=old), loras)
    assert first is not None
    adapter(path, b"other weights")
    os.utime(path / "adapter_model.safetensors", ns=(time.time_ns(), time.time_ns() + 10**9))
    assert keys(request(lora_request=old), loras) is None
    again = keys(request(lora_request=LoRARequest("sql", 2, str(path))), loras)
    assert again is not None
    assert again != first


def test_a_number_under_which_another_adapter_comes_is_shared_with_nobody(
    tmp_path: Path, loras: LoraVersions
) -> None:
    # vLLM looks only at the number, and keeps the adapter that it has.
    assert keys(request(lora_request=LoRARequest("a", 1, str(adapter(tmp_path / "a")))), loras)
    other = LoRARequest("b", 1, str(adapter(tmp_path / "b", b"other weights")))
    assert keys(request(lora_request=other), loras) is None


def test_adapters_beyond_what_is_remembered_share_nothing_and_the_others_go_on(
    tmp_path: Path, loras: LoraVersions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lora, "MAX_NUMBERS", 2)
    of = [LoRARequest(f"a{number}", number, str(adapter(tmp_path / "a"))) for number in range(1, 5)]
    known = [keys(request(lora_request=one), loras) for one in of]
    assert [bool(found) for found in known] == [True, True, False, False]
    assert keys(request(lora_request=of[0]), loras) == known[0]
    reloaded = LoRARequest("a3", 3, str(tmp_path / "a"), load_inplace=True)
    assert keys(request(lora_request=reloaded), loras) is None
    assert len(loras._bound) == 2


def test_adapters_loaded_in_another_type_are_others(tmp_path: Path) -> None:
    lora = LoRARequest("a", 1, str(adapter(tmp_path / "a")))
    found = set()
    for dtype in ("bfloat16", "float16"):
        config = SimpleNamespace(lora_config=SimpleNamespace(lora_dtype=dtype, target_modules=None))
        versions = LoraVersions(lora_traits(config))
        found.add(versions.version_of(lora, 10.0))
        versions.close()
    assert len(found) == 2
    assert lora_traits(SimpleNamespace(lora_config=None)) == ""


def test_the_scheduling_loop_does_not_wait_for_an_adapters_files(
    tmp_path: Path, loras: LoraVersions, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    from kvpool.engines.vllm import lora as module

    may_read = threading.Event()

    def slow(path: str, stamp: Any) -> str:
        may_read.wait(10)
        return "digest"

    monkeypatch.setattr(module, "_content", slow)
    one = request(lora_request=LoRARequest("a", 1, str(adapter(tmp_path / "a"))))
    assert extra_keys(one, loras) is None
    may_read.set()
    assert keys(one, loras) is not None


assert HF_CONFIG["num_hidden_layers"] == FACTS.layers
