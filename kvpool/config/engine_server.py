"""An engine server in `conductor.engines`: where it is, what it serves, and whose KV blocks it makes. Plain values.

The server itself speaks OpenAI's HTTP API and knows nothing of kvpool; so what a kvpool worker would
say of itself when it joins stands in the configuration instead.
"""

from __future__ import annotations

from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

from kvpool.blocks.layout import HashAlgorithm, Layout, Namespace
from kvpool.errors import InvalidArgument


class EngineServer(BaseModel):
    """One server, e.g. `vllm serve`. Its connector must use the very namespace that is described here."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    url: str = Field(max_length=512, description="as http://10.0.0.7:8000, with or without /v1")
    role: Literal["prefill", "decode", "both"] = "both"
    host_label: str = Field(
        "", max_length=128, description='as node.host_label of its node; "": the host in the URL'
    )
    model: str = Field(min_length=1, max_length=512, description="what users ask for")
    served_model: str = Field(
        "", max_length=512, description='what the server calls it; "": the same'
    )
    api_key: SecretStr = SecretStr("")
    max_model_tokens: int = Field(
        0, ge=0, le=16_777_216, description="context; 0: what the server's /v1/models says"
    )
    max_concurrent: int = Field(0, ge=0, le=100_000, description="requests at once; 0: unknown")
    kv_events: str = Field("", max_length=512, description="as worker.kv_events")
    kv_replay: str = Field("", max_length=512, description="as worker.kv_replay")
    namespace_model: str = Field("", max_length=512, description='in the namespace; "": model')
    revision: str = Field(
        "",
        max_length=512,
        description='of the weights; "" only without layers: any that the pool knows',
    )
    dtype: str = "bfloat16"
    layers: int = Field(
        0,
        ge=0,
        description="0: all of the layout is that of the namespace which its connector registered",
    )
    kv_heads: int = 0
    head_dim: int = 0
    block_tokens: int = 64
    tp_size: int = 1
    kv_per_token: int = 2
    order: str = "layer,kv,head,token,dim"
    tenant: str = ""
    salt: SecretStr = SecretStr("")
    hash_algorithm: HashAlgorithm = "xxh3-128"

    @property
    def base_url(self) -> str:
        """Without a path, and without a slash at its end."""
        return self.url.rstrip("/").removesuffix("/v1")

    @property
    def worker_id(self) -> str:
        """Its id as a member: equal at every conductor."""
        return f"engine-{urlsplit(self.url).netloc}"

    @property
    def host(self) -> str:
        """The label of its host."""
        return self.host_label or urlsplit(self.url).hostname or ""

    @property
    def is_described(self) -> bool:
        """Whether the namespace stands here, and need not be looked for among those that the pool knows."""
        return self.layers > 0

    def is_of(self, namespace: Namespace) -> bool:
        """Whether this may be its connector's namespace, as far as the entry says."""
        return (
            (namespace.model, namespace.tenant, namespace.salt, namespace.hash_algorithm)
            == (self.named, self.tenant, self.salt.get_secret_value(), self.hash_algorithm)
        ) and namespace.revision.startswith(self.revision)

    @property
    def named(self) -> str:
        """The model's name in the namespace."""
        return self.namespace_model or self.model

    def namespace(self) -> Namespace:
        """Whose blocks its connector reads and writes, where that `is_described`.

        Raises:
            InvalidArgument: the layout makes no sense.
        """
        layout = Layout(
            self.dtype,
            self.layers,
            self.kv_heads,
            self.head_dim,
            self.block_tokens,
            self.tp_size,
            self.kv_per_token,
            self.order,
        )
        return Namespace(
            self.named,
            self.revision,
            layout,
            self.tenant,
            self.salt.get_secret_value(),
            self.hash_algorithm,
        )

    @model_validator(mode="after")
    def _can_be_used(self) -> Self:
        address = urlsplit(self.url)
        if address.scheme not in ("http", "https") or not address.hostname:
            raise ValueError(f"{self.url!r} is no http:// or https:// address")
        if address.username is not None or address.query:
            raise ValueError("the url of an engine holds no password and no query: see api_key")
        if not self.is_described:
            return self
        try:
            self.namespace()
        except InvalidArgument as error:
            raise ValueError(str(error)) from None
        return self
