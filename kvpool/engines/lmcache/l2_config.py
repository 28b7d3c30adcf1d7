"""`adapter_params` for LMCache's plugin loader: checked settings, and a help text."""

from __future__ import annotations

from typing import Any, Self

from lmcache.v1.distributed.l2_adapters.config import L2AdapterConfigBase

from kvpool.engines.lmcache.settings import AdapterSettings
from kvpool.engines.shared.settings import read_settings
from kvpool.errors import ConfigError

SOURCE = "adapter_params of the l2-adapter"


class KVPoolL2AdapterConfig(L2AdapterConfigBase):
    """Checked `adapter_params`."""

    def __init__(self, settings: AdapterSettings) -> None:
        self.settings = settings

    @classmethod
    def from_dict(cls, given: dict[str, Any]) -> Self:
        """Check `adapter_params`. Raises ValueError: a key is unknown, or a value is invalid."""
        try:
            return cls(read_settings(AdapterSettings, given, SOURCE))
        except ConfigError as error:
            raise ValueError(str(error)) from None

    @classmethod
    def help(cls) -> str:
        """One line for each setting."""
        fields = AdapterSettings.model_fields.items()
        lines = (f"- {name}: {field.description}" for name, field in fields)
        return "kvpool L2 adapter, adapter_params:\n" + "\n".join(lines)
