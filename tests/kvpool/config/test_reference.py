"""docs/settings.md: generated from the schema, and complete."""

from __future__ import annotations

from pathlib import Path

from kvpool.config.engine_server import EngineServer
from kvpool.config.reference import markdown
from kvpool.config.settings import Settings, each_setting

PAGE = Path(__file__).parents[3] / "docs" / "settings.md"


def test_the_page_is_the_one_that_the_settings_give() -> None:
    assert PAGE.read_text() == markdown(), (
        "write it again: python -m kvpool.config.reference > docs/settings.md"
    )


def test_the_page_has_every_setting() -> None:
    page = PAGE.read_text()
    for key, _, _ in each_setting(Settings()):
        assert f"| `{key.rpartition('.')[2]}` |" in page
    assert all(field.description for field in EngineServer.model_fields.values())
