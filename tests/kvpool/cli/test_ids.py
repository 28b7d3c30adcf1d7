"""Short ids of members stay distinct."""

from __future__ import annotations

from kvpool.cli.ids import short_id


def test_engine_servers_are_shown_by_their_whole_address_and_others_by_a_beginning() -> None:
    assert short_id("engine-10.0.0.7:8000", 8) == "10.0.0.7:8000"
    assert short_id("7eb7526a-4b37-4d10-af5d-6f218631e92e", 8) == "7eb7526a"
