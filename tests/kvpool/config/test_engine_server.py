"""Engine servers in the configuration: from YAML or JSON text, and refused when wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvpool.config.loader import load_settings, parse_override
from kvpool.errors import ConfigError


def test_engines_come_from_yaml_or_as_json_text(tmp_path: Any) -> None:
    file = tmp_path / "kvpool.yaml"
    file.write_text(
        "conductor:\n  engines:\n"
        "    - {url: 'http://10.0.0.7:8000/v1', role: prefill, host_label: h7, model: llama,\n"
        "       revision: abc, layers: 32, kv_heads: 8, head_dim: 128, api_key: s3cret}\n"
    )
    [engine] = load_settings(file, {}).settings.conductor.engines
    assert (engine.base_url, engine.worker_id) == ("http://10.0.0.7:8000", "engine-10.0.0.7:8000")
    assert engine.namespace().layout.block_tokens == 64
    text = json.dumps([engine.model_dump(mode="json") | {"api_key": "k"}])
    override = parse_override(f"conductor.engines={text}")
    [again] = load_settings(
        None, {}, [override], directory=tmp_path / "none"
    ).settings.conductor.engines
    assert again.namespace() == engine.namespace()
    assert again.host == "h7"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"url": "10.0.0.7:8000"}, "http"),
        ({"url": "http://user:pw@h"}, "api_key"),
        ({"dtype": "float7"}, "unknown dtype"),
        ({"role": "boss"}, "prefill"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_an_entry_that_cannot_work_is_refused_without_quoting_its_key(
    tmp_path: Any, change: dict[str, Any], words: str
) -> None:
    entry = {"url": "http://h:1", "model": "m", "revision": "r", "api_key": "s3cret"}
    entry |= {"layers": 2, "kv_heads": 2, "head_dim": 8, **change}  # type: ignore[dict-item]
    override = parse_override(f"conductor.engines={json.dumps([entry])}")
    with pytest.raises(ConfigError) as caught:
        load_settings(None, {}, [override], directory=tmp_path)
    assert words in str(caught.value)
    assert "s3cret" not in str(caught.value)
