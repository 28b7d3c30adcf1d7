"""Layouts and namespaces: sizes, refusals, and identities that cover every field."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvpool.blocks.layout import (
    MAX_BLOCK_TOKENS,
    MAX_NAME_CHARS,
    MAX_ORDER_CHARS,
    Layout,
    Namespace,
)
from kvpool.errors import InvalidArgument

SMOL = Layout("bfloat16", layers=30, kv_heads=3, head_dim=64)  # SmolLM2-135M


def test_bytes_of_a_real_model() -> None:
    assert SMOL.bytes_per_token == 23_040
    assert SMOL.block_bytes == 64 * 23_040
    assert SMOL.layer_bytes * 30 == SMOL.part_bytes == SMOL.block_bytes
    assert SMOL.part_shape == (30, 2, 3, 64, 64)


@pytest.mark.parametrize(
    ("kv_heads", "tp_size", "heads_per_part"), [(8, 1, 8), (8, 4, 2), (8, 8, 1), (2, 8, 1)]
)
def test_heads_are_divided_over_ranks_or_replicated(
    kv_heads: int, tp_size: int, heads_per_part: int
) -> None:
    layout = Layout("float16", layers=4, kv_heads=kv_heads, head_dim=16, tp_size=tp_size)
    assert layout.heads_per_part == heads_per_part
    assert layout.part_bytes == 4 * 2 * heads_per_part * 64 * 16 * 2
    assert layout.block_bytes == tp_size * layout.part_bytes


def test_a_latent_vector_instead_of_keys_and_values_counts_once() -> None:
    mla = Layout("bfloat16", layers=61, kv_heads=1, head_dim=576, kv_per_token=1)
    assert mla.bytes_per_token == 61 * 576 * 2


@pytest.mark.parametrize(
    "field", ["layers", "kv_heads", "head_dim", "block_tokens", "tp_size", "kv_per_token"]
)
@pytest.mark.parametrize("bad", [0, -1, 1.0, True, "2", None])
def test_sizes_that_are_no_positive_integers_are_refused(field: str, bad: Any) -> None:
    with pytest.raises(InvalidArgument, match=f"layout.{field}"):
        msgspec.structs.replace(SMOL, **{field: bad})


def test_refusals_name_what_would_do() -> None:
    with pytest.raises(InvalidArgument, match="bfloat16"):
        Layout("bf16", layers=1, kv_heads=1, head_dim=1)
    with pytest.raises(InvalidArgument, match="tp_size=2"):
        Layout("int8", layers=1, kv_heads=3, head_dim=1, tp_size=2)
    with pytest.raises(InvalidArgument, match=str(MAX_BLOCK_TOKENS)):
        Layout("int8", layers=1, kv_heads=1, head_dim=1, block_tokens=MAX_BLOCK_TOKENS + 1)


OTHER_FIELDS: dict[str, Any] = {
    "dtype": "float16",
    "layers": 31,
    "kv_heads": 6,
    "head_dim": 128,
    "block_tokens": 32,
    "tp_size": 3,
    "kv_per_token": 1,
    "order": "layer,kv,token,head,dim",
}


def test_other_fields_cover_the_layout() -> None:
    assert set(OTHER_FIELDS) == set(Layout.__struct_fields__)


@pytest.mark.parametrize("field", OTHER_FIELDS)
def test_every_field_changes_fingerprint_and_namespace_and_is_named(field: str) -> None:
    other = msgspec.structs.replace(SMOL, **{field: OTHER_FIELDS[field]})
    assert other.fingerprint != SMOL.fingerprint
    assert Namespace("m", "r", other).namespace_id != Namespace("m", "r", SMOL).namespace_id
    (difference,) = SMOL.differences(other)
    assert difference.startswith(f"{field}: ")


def test_equal_layouts_have_equal_fingerprints_after_a_trip_over_the_wire() -> None:
    copy = msgspec.msgpack.decode(msgspec.msgpack.encode(SMOL), type=Layout)
    assert copy == SMOL
    assert copy.fingerprint == SMOL.fingerprint
    assert SMOL.differences(copy) == []


def test_a_layout_from_the_wire_is_checked_as_well() -> None:
    fields = {**msgspec.structs.asdict(SMOL), "layers": 0}
    with pytest.raises((InvalidArgument, msgspec.ValidationError)):
        msgspec.convert(fields, Layout)


def test_the_shown_name_hides_tenant_and_salt_but_tells_them_apart() -> None:
    plain = Namespace("smol", "0123456789abcdef", SMOL)
    secret = Namespace("smol", "0123456789abcdef", SMOL, tenant="acme", salt="hunter2")
    assert plain.name == "smol@0123456789ab"
    assert secret.name.startswith("smol@0123456789ab#")
    assert "acme" not in secret.name
    assert "hunter2" not in secret.name
    assert secret.name != Namespace("smol", "0123456789abcdef", SMOL, tenant="acme").name


def test_tenant_and_salt_do_not_run_into_each_other() -> None:
    one = Namespace("m", "r", SMOL, tenant="a", salt="b")
    two = Namespace("m", "r", SMOL, tenant="ab", salt="")
    assert one.namespace_id != two.namespace_id
    assert one.name != two.name


@pytest.mark.parametrize(
    ("model", "revision"), [("", "r"), ("m", ""), ("m" * 513, "r"), (None, "r")]
)
def test_namespaces_without_identity_are_refused(model: Any, revision: Any) -> None:
    with pytest.raises(InvalidArgument, match="1 to 512"):
        Namespace(model, revision, SMOL)


@pytest.mark.parametrize("field", ["tenant", "salt"])
@pytest.mark.parametrize("bad", ["x" * (MAX_NAME_CHARS + 1), "x" * 70_000, None, 7])
def test_tenants_and_salts_that_fit_no_record_are_refused(field: str, bad: Any) -> None:
    with pytest.raises(InvalidArgument, match=f"namespace.{field} must be at most 512"):
        Namespace("m", "r", SMOL, **{field: bad})
    msgspec.structs.replace(Namespace("m", "r", SMOL), **{field: "x" * MAX_NAME_CHARS})


@pytest.mark.parametrize("bad", ["x" * (MAX_ORDER_CHARS + 1), None, 7])
def test_orders_that_fit_no_record_are_refused(bad: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"layout\.order must be at most 256"):
        msgspec.structs.replace(SMOL, order=bad)
    msgspec.structs.replace(SMOL, order="x" * MAX_ORDER_CHARS)


def test_unknown_hash_algorithms_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="sha256"):
        Namespace("m", "r", SMOL, hash_algorithm="md5")  # type: ignore[arg-type]
