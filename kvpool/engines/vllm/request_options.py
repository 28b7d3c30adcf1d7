"""What one request asks of the pool: `"kv_transfer_params": {"kvpool": {"load": false, "save": false}}`."""

from __future__ import annotations

from typing import Any

import msgspec
import structlog

log = structlog.get_logger(__name__)


class RequestOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whether a request may be served from the pool, and its blocks stored there."""

    load: bool = True
    save: bool = True


def options_of(request: Any) -> RequestOptions:
    """Of vLLM's `Request`; one whose options cannot be read shares nothing, for it may have asked just that."""
    told = (request.kv_transfer_params or {}).get("kvpool")
    if told is None:
        return RequestOptions()
    try:
        return msgspec.convert(told, RequestOptions)
    except msgspec.ValidationError as error:
        log.warning(
            "a request shares nothing: kv_transfer_params.kvpool takes load and save, true or false",
            request=request.request_id,
            error=str(error),
        )
        return RequestOptions(load=False, save=False)
