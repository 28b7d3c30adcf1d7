"""What engines hand over is checked, and an unknown key is named with the nearest known one."""

from __future__ import annotations

import pytest

from kvpool.engines.shared.settings import EngineSettings, read_settings
from kvpool.errors import ConfigError


def test_a_misspelt_key_is_named_with_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match=r"here: unknown setting 'conducter'.*'conductor'"):
        read_settings(EngineSettings, {"conducter": "10.0.0.1:7800"}, "here")


def test_a_bad_value_is_named_with_its_key_and_a_secret_is_not_quoted() -> None:
    with pytest.raises(ConfigError, match="conductor: 'nowhere' is not host:port"):
        read_settings(EngineSettings, {"conductor": "nowhere"}, "here")
    with pytest.raises(ConfigError) as caught:
        read_settings(EngineSettings, {"token": ["s3cret"]}, "here")
    assert "s3cret" not in str(caught.value)


def test_one_node_takes_the_place_of_the_conductor() -> None:
    arguments = read_settings(EngineSettings, {"node": "10.0.0.2:7810"}, "here").pool_arguments(1)
    assert arguments["conductor"] is None
    assert arguments["node"] == "10.0.0.2:7810"


def test_a_back_off_cannot_be_longer_than_its_longest() -> None:
    with pytest.raises(ConfigError, match="max_backoff_s"):
        read_settings(EngineSettings, {"backoff_s": 20, "max_backoff_s": 10}, "here")
