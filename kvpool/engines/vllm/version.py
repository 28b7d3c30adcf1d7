"""Which versions of vLLM the connector is written for. vLLM calls its interface experimental and means it."""

from __future__ import annotations

from kvpool.errors import ConfigError

SUPPORTED = ("0.32",)


def require_supported(version: str | None = None) -> None:
    """See that vLLM is one that this connector knows.

    Args:
        version: as vLLM tells it; None: that of the one installed.

    Raises:
        ConfigError: it is another one, or there is none.
    """
    if version is None:
        try:
            import vllm
        except ImportError as error:
            raise ConfigError(f"vLLM cannot be imported: {error}", hint="install vllm") from error
        version = vllm.__version__
    if not version.startswith(tuple(f"{series}." for series in SUPPORTED)):
        raise ConfigError(
            f"KVPoolConnector does not know vLLM {version}: its connector interface changes with"
            " every version, and a wrong guess serves wrong text",
            hint=f"supported: {', '.join(f'{series}.x' for series in SUPPORTED)}",
        )
