"""Describe bodies, responses and errors in OpenAPI documents, for conductor and node.

FastAPI cannot find them: msgspec decodes the bodies, and `kvpool.errors` defines the errors.
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
    "4XX": "The request is refused; `error.code` and `error.message` say why.",
    "429": "Refused because of load: try again after `Retry-After` seconds. `X-Kvpool-Reason` "
    "says why.",
    "503": "No process can serve this now.",
    "504": "The deadline passed.",
    "507": "There is no room, and nothing can be evicted now.",
}
OBJECT: dict[str, Any] = {"type": "object"}
EVENTS: dict[str, Any] = {}  # a stream; tools differ in what they validate against its schema
BINARY: dict[str, Any] = {"type": "string", "format": "binary"}


def responses(**kinds: dict[str, Any]) -> dict[int | str, dict[str, Any]]:
    """A route's `responses`.

    Write a media type with underscores: `responses(application_json=OBJECT)`.
    """
    content = {
        name.replace("_", "/", 1).replace("_", "-"): {"schema": schema}
        for name, schema in kinds.items()
    }
    return {200: {"description": "Done", "content": content}}


def add_bodies(app: FastAPI, *shapes: type) -> dict[type, dict[str, Any]]:
    """Describe bodies that msgspec decodes. Returns the `openapi_extra` of each body's route."""
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
    """The `openapi_extra` of a route that decodes its body itself."""
    return {"requestBody": {"required": True, "content": {media_type: {"schema": schema}}}}


def add_errors(app: FastAPI) -> None:
    """Describe the errors of every route, in place of FastAPI's own."""
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
