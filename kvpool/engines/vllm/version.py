"""The versions of vLLM that the connector supports. vLLM's connector interface is experimental."""

from __future__ import annotations

from kvpool.errors import ConfigError

SUPPORTED = ("0.32",)


def require_supported(version: str | None = None) -> None:
    """Check the version of vLLM.

    Args:
        version: default: the installed version.

    Raises:
        ConfigError: the version is not supported, or vLLM is not installed.
    """
    if version is None:
        try:
            import vllm
        except ImportError as error:
            raise ConfigError(f"vLLM cannot be imported: {error}", hint="install vllm") from error
        version = vllm.__version__
    if not version.startswith(tuple(f"{series}." for series in SUPPORTED)):
        raise ConfigError(
            f"KVPoolConnector does not support vLLM {version}: the connector interface changes with"
            " every version, and a mistake would produce wrong text",
            hint=f"supported: {', '.join(f'{series}.x' for series in SUPPORTED)}",
        )
