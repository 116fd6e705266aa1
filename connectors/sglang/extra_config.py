"""The JSON that names our storage backend to SGLang.

HiCache loads a storage backend of another package by the name ``dynamic`` and one JSON with its class.
``completed`` writes that JSON, for `moonpool sglang` and for the short name ``moonpool``.
"""

from __future__ import annotations

from collections.abc import Mapping

from moonpool.core.errors import ConfigError

EXTRA_CONFIG = "--hicache-storage-backend-extra-config"

# Where SGLang finds our class, and that it moves pages without a copy in between.
_CLASS: Mapping[str, object] = {
    "backend_name": "moonpool",
    "module_path": "moonpool.connectors.sglang",
    "class_name": "MoonpoolHiCache",
    "interface_v1": 1,
}


def completed(extra: Mapping[str, object]) -> dict[str, object]:
    """``extra`` as the extra config of the backend ``dynamic``. Raises ConfigError when it names another
    class."""
    for key, value in _CLASS.items():
        if key in extra and extra[key] != value:
            raise ConfigError(
                f"{EXTRA_CONFIG}: {key} is {extra[key]!r}, not {value!r}; leave it out",
                operation="config",
                key=key,
            )
    return {**_CLASS, "hicache_storage_pass_prefix_keys": True, **extra}
