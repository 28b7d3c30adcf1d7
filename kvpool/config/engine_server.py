"""An entry of `conductor.engines`: an OpenAI-compatible server, its model, and the namespace of its
KV blocks.

Such a server does not join the pool as a kvpool worker does, so the configuration describes it.
"""

from __future__ import annotations

from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

from kvpool.blocks.layout import HashAlgorithm, Layout, Namespace
from kvpool.errors import InvalidArgument


class EngineServer(BaseModel):
    """One server, as `vllm serve`. Its connector must use the namespace described here."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    url: str = Field(
        max_length=512, description="address, as http://10.0.0.7:8000, with or without /v1"
    )
    role: Literal["prefill", "decode", "both"] = Field("both", description="what it does")
    host_label: str = Field(
        "", max_length=128, description="node.host_label of its host; empty: the host in url"
    )
    model: str = Field(min_length=1, max_length=512, description="name that users ask for")
    served_model: str = Field(
        "", max_length=512, description="the server's own name of the model; empty: the same"
    )
    api_key: SecretStr = Field(SecretStr(""), description="key that the server asks for")
    max_model_tokens: int = Field(
        0, ge=0, le=16_777_216, description="longest context in tokens; 0: as its /v1/models says"
    )
    max_concurrent: int = Field(
        0, ge=0, le=100_000, description="requests that it works on at once; 0: unknown"
    )
    kv_events: str = Field(
        "", max_length=512, description="where it publishes KV events, as tcp://10.0.0.7:5557"
    )
    kv_replay: str = Field(
        "", max_length=512, description="where it replays KV events, as tcp://10.0.0.7:5558"
    )
    namespace_model: str = Field(
        "", max_length=512, description="name of the model in the namespace; empty: model"
    )
    revision: str = Field(
        "",
        max_length=512,
        description="revision of the weights; empty, which needs layers to be 0: any that the "
        "pool knows",
    )
    dtype: str = Field("bfloat16", description="dtype of the KV cache")
    layers: int = Field(
        0,
        ge=0,
        description="layers of the model; 0: take the whole layout from the namespace that its "
        "connector "
        "registered",
    )
    kv_heads: int = Field(0, description="KV heads, over all ranks")
    head_dim: int = Field(0, description="dimension of a head")
    block_tokens: int = Field(64, description="tokens in a block of the pool")
    tp_size: int = Field(1, description="tensor-parallel ranks")
    kv_per_token: int = Field(
        2, description="tensors for each token: 2 for keys and values, 1 for MLA"
    )
    order: str = Field(
        "layer,kv,head,token,dim", description="order of the axes in a block, slowest first"
    )
    tenant: str = Field("", description="tenant of its blocks")
    salt: SecretStr = Field(SecretStr(""), description="the connector's salt")
    hash_algorithm: HashAlgorithm = Field("xxh3-128", description="the connector's hash_algorithm")

    @property
    def base_url(self) -> str:
        """The address without /v1 and without a slash at its end."""
        return self.url.rstrip("/").removesuffix("/v1")

    @property
    def worker_id(self) -> str:
        """Its id as a member, the same at every conductor."""
        return f"engine-{urlsplit(self.url).netloc}"

    @property
    def host(self) -> str:
        """The label of its host: `host_label`, else the host in `url`."""
        return self.host_label or urlsplit(self.url).hostname or ""

    @property
    def is_described(self) -> bool:
        """Whether the entry gives the whole namespace.

        Otherwise the pool's namespaces are searched for it.
        """
        return self.layers > 0

    def is_of(self, namespace: Namespace) -> bool:
        """Whether `namespace` has all that the entry gives, so that it may be its connector's."""
        return (
            (namespace.model, namespace.tenant, namespace.salt, namespace.hash_algorithm)
            == (self.named, self.tenant, self.salt.get_secret_value(), self.hash_algorithm)
        ) and namespace.revision.startswith(self.revision)

    @property
    def named(self) -> str:
        """The name of the model in the namespace."""
        return self.namespace_model or self.model

    def namespace(self) -> Namespace:
        """The namespace whose blocks its connector reads and writes. Needs `is_described`.

        Raises:
            InvalidArgument: the layout is invalid.
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
            raise ValueError(f"{self.url!r} is not an http:// or https:// address")
        if address.username is not None or address.query:
            raise ValueError("url must have no password and no query; use api_key")
        if not self.is_described:
            return self
        try:
            self.namespace()
        except InvalidArgument as error:
            raise ValueError(str(error)) from None
        return self
