"""The HTTP faces as schemathesis finds them: by their OpenAPI documents alone, with bodies that fit and that do not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.support.process_cluster import LAYOUT, NAMESPACE, Cluster
from tests.support.sizes import examples
from tests.support.tiny_tokenizer import save_tiny_tokenizer

ENGINE = (
    "worker.max_concurrent=64",
    "fake_engine.prefill_base_s=0",
    "fake_engine.prefill_token_s=0",
    "fake_engine.tpot_base_s=0",
    "fake_engine.tpot_sequence_s=0",
)
CONFORMING = [
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
FACES = ("conductor", "node")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    running = Cluster(tmp_path_factory.mktemp("openapi"))
    with running.supervisor:
        tokenizer = save_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))
        running.start_conductor(
            "conductor.advanced.max_output_tokens=8",
            "conductor.advanced.heartbeat_s=0.5",
            model=str(tokenizer),
        )
        running.start_node("n")
        running.launch_fake_worker("w", "both", *ENGINE)
        running.wait_joined(nodes=1, workers=1)
        yield running


def url(cluster: Cluster, face: str) -> str:
    facts = cluster.conductor if face == "conductor" else cluster.nodes["n"]
    return f"http://{facts['http']}"


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("face", FACES)
def test_every_route_answers_as_its_document_says(
    cluster: Cluster, face: str, mode: GenerationMode
) -> None:
    schema = schemathesis.openapi.from_url(f"{url(cluster, face)}/openapi.json")
    every: Any = schema.get_all_operations()  # results: `ok()` is what each holds
    operations = [found.ok() for found in every]
    assert len(operations) >= 8
    for operation in operations:
        if operation.path == "/v1/dram" and mode is GenerationMode.POSITIVE:
            continue  # a node would obey, and this machine may not have so much memory
        cases = operation.as_strategy(generation_mode=mode)

        @settings(
            max_examples=examples(15),
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=cases)
        def answers(case: schemathesis.Case[Any]) -> None:
            response = case.call(timeout=30)
            # 503, 504 and 507 are documented: nobody to ask, too late, no room.
            assert response.status_code != 500, response.text[:500]
            case.validate_response(response, checks=CONFORMING)

        try:
            answers()
        except Unsatisfiable:
            if mode is GenerationMode.POSITIVE:
                raise  # a route without anything that could be wrong has no negative cases


@pytest.mark.parametrize("face", FACES)
def test_errors_bodies_and_kinds_of_answers_are_documented(cluster: Cluster, face: str) -> None:
    document = httpx.get(f"{url(cluster, face)}/openapi.json", timeout=10).json()
    schemas = document["components"]["schemas"]
    assert "Error" in schemas
    assert not {"HTTPValidationError", "ValidationError"} & set(schemas)
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert "422" not in operation["responses"], path
            assert "4XX" in operation["responses"], path
            if method in ("post", "put"):
                assert operation["requestBody"]["content"], path
    if face == "conductor":
        # Half of what schemathesis sends streams; what such an answer holds, test_openai_client.py tells.
        chat = document["paths"]["/v1/chat/completions"]["post"]
        assert set(chat["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
        assert "messages" in schemas["ChatRequest"]["properties"]


def test_a_block_goes_in_and_comes_out_as_documented(cluster: Cluster) -> None:
    base = url(cluster, "node")
    space = {"model": NAMESPACE.model, "revision": NAMESPACE.revision}
    layout = {name: getattr(LAYOUT, name) for name in LAYOUT.__struct_fields__}
    named = httpx.post(f"{base}/v1/namespaces", json={**space, "layout": layout}, timeout=10).json()
    path = f"{base}/v1/blocks/{named['namespace_id']}/{'ab' * 16}"
    data = bytes(LAYOUT.part_bytes)
    assert httpx.put(path, content=data, timeout=10).json() == {"status": "stored"}
    got = httpx.get(path, timeout=10)
    assert (got.content, got.headers["content-type"]) == (data, "application/octet-stream")
