"""The error for a setting of the proxy that cannot be meant."""

from __future__ import annotations

from moonpool.core.errors import ConfigError


def bad(key: str, sentence: str) -> ConfigError:
    """key: below [proxy]. sentence: names the setting and the remedy."""
    return ConfigError(f"proxy: {sentence}", operation="config", key=f"proxy.{key}")
