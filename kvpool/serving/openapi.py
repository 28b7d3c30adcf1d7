"""What the OpenAPI pages say beyond what FastAPI finds out by itself: bodies, kinds of answers, errors.

Bodies are decoded by msgspec, not by FastAPI, and errors are made from the one tree of `kvpool.errors`; so
both are described here, once for conductor and node.
"""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI

ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "code", "param"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "code": {"type": "string", "description": "stable; one of kvpool.errors"},
                "param": {"type": "null"},
            },
        }
    },
}
ERRORS = {
    "4XX": "The request cannot be served as it is; `error.code` and `error.message` say why.",
    "429": "Refused early: come back after `Retry-After` seconds; `X-Kvpool-Reason` says why.",
    "503": "Nobody can serve this now, or whoever could went away.",
    "504": "It was not done within its deadline.",
    "507": "There is no room, and none can be made now.",
}
OBJECT: dict[str, Any] = {"type": "object"}
EVENTS: dict[str, Any] = {}  # a stream of them; readers differ in what they hold a schema against
BINARY: dict[str, Any] = {"type": "string", "format": "binary"}


def answers(**kinds: dict[str, Any]) -> dict[int | str, dict[str, Any]]:
    """For a route's `responses`: schema by media type, written `application_json=OBJECT`."""
    content = {
        name.replace("_", "/", 1).replace("_", "-"): {"schema": schema}
        for name, schema in kinds.items()
    }
    return {200: {"description": "Done", "content": content}}


def add_bodies(app: FastAPI, *shapes: type) -> dict[type, dict[str, Any]]:
    """Describe bodies that msgspec decodes; by shape, the `openapi_extra` of its route."""
    references, components = msgspec.json.schema_components(
        shapes, ref_template="#/components/schemas/{name}"
    )
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        document = generate()
        document.setdefault("components", {}).setdefault("schemas", {}).update(components)
        return document

    app.openapi = openapi  # type: ignore[method-assign]
    return {
        shape: body("application/json", reference)
        for shape, reference in zip(shapes, references, strict=True)
    }


def body(media_type: str, schema: dict[str, Any]) -> dict[str, Any]:
    """The `openapi_extra` of a route that reads its body itself."""
    return {"requestBody": {"required": True, "content": {media_type: {"schema": schema}}}}


def add_errors(app: FastAPI) -> None:
    """Say of every route how it fails, in place of the shape that FastAPI would have used."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        document = generate()
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        schemas["Error"] = ERROR
        reference = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
        for path in document["paths"].values():
            for operation in path.values():
                responses = operation["responses"]
                responses.pop("422", None)
                for status, text in ERRORS.items():
                    responses.setdefault(status, {"description": text, "content": reference})
        return document

    app.openapi = openapi  # type: ignore[method-assign]
