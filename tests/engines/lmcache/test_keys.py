"""From LMCache's keys to namespaces and hashes: fixed for good, and injective. No pool."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from lmcache.utils import CacheEngineKey, LayerCacheEngineKey
from lmcache.v1.distributed.api import ObjectKey

from kvpool.engines.lmcache.keys import Keyspace, ObjectLayout, object_layout
from kvpool.engines.lmcache.settings import AdapterSettings
from kvpool.errors import InvalidArgument

LAYOUT = object_layout([(2, 4, 16, 64)], [torch.bfloat16])


def keyspace(**options: Any) -> Keyspace:
    return Keyspace(AdapterSettings(**{"revision": "r1", **options}))


def object_key(**fields: Any) -> ObjectKey:
    given = {"chunk_hash": bytes(range(32)), "model_name": "tests/model", "kv_rank": 0x01000100}
    return ObjectKey(**{**given, **fields})


def engine_key(**fields: Any) -> CacheEngineKey:
    given = {
        "model_name": "tests/model",
        "world_size": 1,
        "worker_id": 0,
        "chunk_hash": 0x1234,
        "dtype": torch.bfloat16,
    }
    return CacheEngineKey(**{**given, **fields})


def test_names_are_what_they_were_when_objects_were_stored_under_them() -> None:
    space = keyspace()
    stored = space.server_item(object_key(), LAYOUT)
    assert stored.ident.hex() == "6cdfe92e90d8da12eabb33c37450388b013ae0cd17b201cce537a5ce25250493"
    assert space.engine_item(engine_key(), LAYOUT).name.hex() == "ecfdb4467b5fd2170743edbc88ff71bd"


def test_two_instances_agree_and_each_setting_of_identity_counts() -> None:
    assert keyspace().server_item(object_key(), LAYOUT) == keyspace().server_item(
        object_key(), LAYOUT
    )
    idents = {
        keyspace(**options).server_item(object_key(), LAYOUT).ident
        for options in (
            {},
            {"revision": "r2"},
            {"salt": "s"},
            {"tenant": "t"},
            {"hash_algorithm": "sha256"},
        )
    }
    assert len(idents) == 5


def test_every_field_of_a_key_counts() -> None:
    space = keyspace()
    server: list[dict[str, Any]] = [
        {},
        {"chunk_hash": bytes(32)},
        {"model_name": "tests/other"},
        {"kv_rank": 0x02010201},
        {"object_group_id": 1},
        {"cache_salt": "alice"},
    ]
    engine: list[dict[str, Any]] = [
        {},
        {"chunk_hash": 0x1235},
        {"chunk_hash": -0x1234},
        {"model_name": "tests/other"},
        {"world_size": 2},
        {"world_size": 2, "worker_id": 1},
        {"dtype": torch.float16},
        {"request_configs": {"lmcache.tag.user": "alice"}},
        {"request_configs": {"lmcache.tag.user": "bob"}},
        {"request_configs": {"lmcache.tag.us": "er%alice"}},
    ]
    items = [space.server_item(object_key(**fields), LAYOUT) for fields in server]
    items += [space.engine_item(engine_key(**fields), LAYOUT) for fields in engine]
    layer = LayerCacheEngineKey("tests/model", 1, 0, 0x1234, torch.bfloat16, layer_id=0)
    items.append(space.engine_item(layer, LAYOUT))
    assert len({item.ident for item in items}) == len(items)


def test_layouts_of_equal_size_are_told_apart_and_each_has_its_size() -> None:
    layouts = [
        LAYOUT,
        object_layout([(2, 4, 16, 64)], [torch.float16]),
        object_layout([(2, 4, 64, 16)], [torch.bfloat16]),
        object_layout([(1, 4, 16, 64), (1, 4, 16, 64)], [torch.bfloat16] * 2),
        object_layout([(2, 4, 16, 64)], [torch.bfloat16], "KV_2LTD"),
        object_layout([(2, 4, 16, 64)], [torch.bfloat16], "KV_MLA_FMT"),
    ]
    space = keyspace()
    namespaces = [space.space("tests/model", layout).namespace for layout in layouts]
    assert {n.layout.part_bytes for n in namespaces} == {2 * 2 * 4 * 16 * 64}
    for one, other in itertools.combinations(namespaces, 2):
        assert one.namespace_id != other.namespace_id
        # The pool allows one layout for each owner, so these need owners of their own.
        assert one.revision != other.revision


def test_a_layout_of_many_tensors_is_named_by_its_digest() -> None:
    many = object_layout([(2, 1, 16, 64)] * 40, [torch.bfloat16] * 40)
    other = object_layout([(2, 1, 16, 64)] * 39 + [(2, 1, 64, 16)], [torch.bfloat16] * 40)
    space = keyspace()
    names = {space.space("m", layout).namespace.layout.order for layout in (many, other)}
    assert len(names) == 2
    assert all(len(name) < 100 for name in names)


def test_an_object_without_bytes_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="without bytes"):
        object_layout([(0, 4)], [torch.bfloat16])
    assert isinstance(LAYOUT, ObjectLayout)


def test_items_of_one_prompt_and_rank_are_of_one_row() -> None:
    space = keyspace()
    one, two = (space.server_item(object_key(chunk_hash=bytes([n] * 32)), LAYOUT) for n in (1, 2))
    elsewhere = space.server_item(object_key(kv_rank=0x02010201), LAYOUT)
    assert one.row == two.row != elsewhere.row
