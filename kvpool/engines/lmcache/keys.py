"""Maps LMCache's keys to kvpool: to a namespace (model, revision, object layout) and a hash.

LMCache stores opaque objects: the KV of one chunk of tokens on one rank. Each becomes one block of
one part, kept byte for byte. Its layout (format, shapes, dtypes) is part of the namespace, so an
object of another shape, dtype, chunk size or number of tokens is another block. Everything else in
LMCache's key (model, chunk hash, rank, world size, object group, salt, tags) goes into the hash.

Does no I/O, except to hash the model's files. Imports nothing from LMCache.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from kvpool.blocks.hashing import chain_root, object_hash
from kvpool.blocks.layout import MAX_ORDER_CHARS, Layout, Namespace
from kvpool.bounded import BoundedDict
from kvpool.engines.lmcache.settings import LMCacheSettings
from kvpool.errors import InvalidArgument

FORMAT = 1  # of the hashed keys; another number hides everything stored before
MAX_SPACES = 1024  # namespaces cached; computing one again costs a hash


class ObjectLayout(NamedTuple):
    """The layout of an object's bytes. Equal texts mean interchangeable bytes."""

    text: str
    size_bytes: int


class Space(NamedTuple):
    """A namespace, its id (slow to compute, so kept), and the root of its objects' hashes."""

    namespace: Namespace
    namespace_id: bytes
    root: bytes


class Item(NamedTuple):
    """One object in the pool. Items of one `row` follow each other like the chunks of a prompt."""

    space: Space
    name: bytes  # 16 bytes
    row: bytes  # the common part of their keys, with the namespace

    @property
    def ident(self) -> bytes:
        """The object's unique name in the pool."""
        return self.space.namespace_id + self.name


def object_layout(shapes: Iterable[Any], dtypes: Iterable[Any], form: str = "") -> ObjectLayout:
    """The layout of an object of one or several tensors in a row, each a shape and a `torch.dtype`.

    Args:
        form: LMCache's memory format, if several are in use.

    Raises:
        InvalidArgument: the object has no bytes.
    """
    texts, size_bytes = [], 0
    for shape, dtype in zip(shapes, dtypes, strict=True):
        count = 1
        for dimension in shape:
            count *= int(dimension)
        size_bytes += count * int(dtype.itemsize)
        name = str(dtype).removeprefix("torch.")
        texts.append(f"{name}[{','.join(str(int(d)) for d in shape)}]")
    if size_bytes < 1:
        raise InvalidArgument("an object without bytes cannot be stored")
    text = ";".join(texts)
    return ObjectLayout(f"{form}:{text}" if form else text, size_bytes)


def layout_of(memory: Any, form: str = "") -> ObjectLayout:
    """The layout of an LMCache memory object. Raises as `object_layout`."""
    meta = memory.metadata
    return object_layout(meta.shapes or [meta.shape], meta.dtypes or [meta.dtype], form)


class Keyspace:
    """Names objects under one set of settings. Equal settings give equal names in every process.

    Raises:
        ModelNotFound: the model's files are not at `model_path`.
    """

    def __init__(self, settings: LMCacheSettings) -> None:
        self._settings = settings
        self._weights = settings.weights()
        self._spaces: BoundedDict[tuple[str, str], Space] = BoundedDict(MAX_SPACES)

    def space(self, model: str, layout: ObjectLayout) -> Space:
        """The namespace of a model's objects of one layout.

        Raises:
            InvalidArgument: the model's name is empty or too long.
        """
        known = self._spaces.get((model, layout.text))
        if known is not None:
            return known
        settings = self._settings
        digest = hashlib.sha256(layout.text.encode()).hexdigest()
        # The pool allows one layout per model and revision, but LMCache has several per model.
        revision = f"{self._weights}/lmcache-{digest[:16]}"
        text = f"lmcache:{layout.text}"
        namespace = Namespace(
            model,
            revision,
            # Plain bytes: nodes must return them unchanged, so they must not quantise them.
            Layout(
                "uint8",
                layers=1,
                kv_heads=1,
                head_dim=layout.size_bytes,
                block_tokens=1,
                kv_per_token=1,
                order=text if len(text) <= MAX_ORDER_CHARS else f"lmcache:{digest}",
            ),
            settings.tenant,
            settings.salt.get_secret_value(),
            settings.hash_algorithm,
        )
        root = chain_root(namespace, (f"lmcache-{FORMAT}",))
        made = Space(namespace, namespace.namespace_id, root)
        self._spaces[model, layout.text] = made
        return made

    def server_item(self, key: Any, layout: ObjectLayout) -> Item:
        """The item of an `ObjectKey` of the multi-process server."""
        space = self.space(key.model_name, layout)
        row = msgspec.msgpack.encode(
            ["object", key.model_name, key.kv_rank, key.object_group_id, key.cache_salt]
        )
        return _item(space, row, bytes(key.chunk_hash))

    def engine_item(self, key: Any, layout: ObjectLayout) -> Item:
        """The item of a `CacheEngineKey` of the in-process mode, or of a layer's key."""
        space = self.space(key.model_name, layout)
        tags = [[str(name), str(value)] for name, value in key.tags or ()]
        layer = getattr(key, "layer_id", -1)
        row = msgspec.msgpack.encode(
            ["engine", key.model_name, key.world_size, key.worker_id, str(key.dtype), tags, layer]
        )
        chunk = key.chunk_hash
        # Bytes of any length, or an integer, negative if it is Python's own hash.
        text = chunk if isinstance(chunk, bytes) else f"{int(chunk):x}".encode()
        return _item(space, row, text)


def _item(space: Space, row: bytes, chunk: bytes) -> Item:
    name = msgspec.msgpack.encode([row, chunk])
    return Item(space, object_hash(space.namespace, space.root, name), space.namespace_id + row)
