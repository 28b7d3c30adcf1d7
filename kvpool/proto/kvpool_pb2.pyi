from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Layout(_message.Message):
    __slots__ = ("dtype", "layers", "kv_heads", "head_dim", "block_tokens", "tp_size", "kv_per_token", "order")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TP_SIZE_FIELD_NUMBER: _ClassVar[int]
    KV_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    tp_size: int
    kv_per_token: int
    order: str
    def __init__(self, dtype: _Optional[str] = ..., layers: _Optional[int] = ..., kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., block_tokens: _Optional[int] = ..., tp_size: _Optional[int] = ..., kv_per_token: _Optional[int] = ..., order: _Optional[str] = ...) -> None: ...

class Namespace(_message.Message):
    __slots__ = ("model", "revision", "layout", "tenant", "salt", "hash_algorithm")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    HASH_ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    model: str
    revision: str
    layout: Layout
    tenant: str
    salt: str
    hash_algorithm: str
    def __init__(self, model: _Optional[str] = ..., revision: _Optional[str] = ..., layout: _Optional[_Union[Layout, _Mapping]] = ..., tenant: _Optional[str] = ..., salt: _Optional[str] = ..., hash_algorithm: _Optional[str] = ...) -> None: ...

class RegisterNamespaceRequest(_message.Message):
    __slots__ = ("namespace",)
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    namespace: Namespace
    def __init__(self, namespace: _Optional[_Union[Namespace, _Mapping]] = ...) -> None: ...

class RegisterNamespaceReply(_message.Message):
    __slots__ = ("namespace_id", "name")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    name: str
    def __init__(self, namespace_id: _Optional[bytes] = ..., name: _Optional[str] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("namespace_id", "hashes", "host")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    hashes: _containers.RepeatedScalarFieldContainer[bytes]
    host: str
    def __init__(self, namespace_id: _Optional[bytes] = ..., hashes: _Optional[_Iterable[bytes]] = ..., host: _Optional[str] = ...) -> None: ...

class Segment(_message.Message):
    __slots__ = ("node_id", "start", "count", "tier")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    start: int
    count: int
    tier: str
    def __init__(self, node_id: _Optional[str] = ..., start: _Optional[int] = ..., count: _Optional[int] = ..., tier: _Optional[str] = ...) -> None: ...

class LookupReply(_message.Message):
    __slots__ = ("found", "segments")
    FOUND_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    found: int
    segments: _containers.RepeatedCompositeFieldContainer[Segment]
    def __init__(self, found: _Optional[int] = ..., segments: _Optional[_Iterable[_Union[Segment, _Mapping]]] = ...) -> None: ...

class NodesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class NodeInfo(_message.Message):
    __slots__ = ("node_id", "epoch", "host", "address", "http_address", "state", "free_bytes", "capacity_bytes", "transports")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HTTP_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    epoch: int
    host: str
    address: str
    http_address: str
    state: str
    free_bytes: int
    capacity_bytes: int
    transports: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, node_id: _Optional[str] = ..., epoch: _Optional[int] = ..., host: _Optional[str] = ..., address: _Optional[str] = ..., http_address: _Optional[str] = ..., state: _Optional[str] = ..., free_bytes: _Optional[int] = ..., capacity_bytes: _Optional[int] = ..., transports: _Optional[_Iterable[str]] = ...) -> None: ...

class NodesReply(_message.Message):
    __slots__ = ("nodes",)
    NODES_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[NodeInfo]
    def __init__(self, nodes: _Optional[_Iterable[_Union[NodeInfo, _Mapping]]] = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatsReply(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: str
    def __init__(self, json: _Optional[str] = ...) -> None: ...

class NodeLookupRequest(_message.Message):
    __slots__ = ("namespace_id", "hashes")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    hashes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, namespace_id: _Optional[bytes] = ..., hashes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class NodeLookupReply(_message.Message):
    __slots__ = ("found", "tiers")
    FOUND_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    found: int
    tiers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, found: _Optional[int] = ..., tiers: _Optional[_Iterable[str]] = ...) -> None: ...

class PutRequest(_message.Message):
    __slots__ = ("namespace_id", "block_hash", "parent", "part", "data")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASH_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    block_hash: bytes
    parent: bytes
    part: int
    data: bytes
    def __init__(self, namespace_id: _Optional[bytes] = ..., block_hash: _Optional[bytes] = ..., parent: _Optional[bytes] = ..., part: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class PutReply(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: str
    def __init__(self, status: _Optional[str] = ...) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("namespace_id", "block_hash", "part")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASH_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    block_hash: bytes
    part: int
    def __init__(self, namespace_id: _Optional[bytes] = ..., block_hash: _Optional[bytes] = ..., part: _Optional[int] = ...) -> None: ...

class GetReply(_message.Message):
    __slots__ = ("data", "checksum", "tier")
    DATA_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    checksum: int
    tier: str
    def __init__(self, data: _Optional[bytes] = ..., checksum: _Optional[int] = ..., tier: _Optional[str] = ...) -> None: ...
