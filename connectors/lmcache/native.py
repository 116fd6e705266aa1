"""The native L2 client for LMCache's server: ``{"type": "native_plugin", "module_path":
"moonpool.connectors.lmcache.native", "class_name": "MoonpoolClient", "adapter_params": {"form": "..."}}``.

Its methods are C++ (core/csrc/python/batch_module.cpp); only making and closing it is Python.
"""

from __future__ import annotations

from typing import Any

from lmcache.logging import init_logger

from moonpool import _native
from moonpool.connectors.lmcache.identity import fingerprint
from moonpool.connectors.lmcache.pool import open_pool
from moonpool.connectors.lmcache.settings import Settings
from moonpool.core.errors import ConfigError

log = init_logger("lmcache.moonpool.native")
PLUG = "l2"


class MoonpoolClient(_native.BatchClient):
    """LMCache's native L2 client.

    form: what the bytes of the chunks are, in any words ("bfloat16"). LMCache tells a native client neither
        type nor shape, and float16 has the size of bfloat16, so servers share only chunks of the same form.
    options: the others, see Settings.

    Without a node every operation fails at once until one appears. Raises ConfigError for wrong options, and
    with ``require_pool`` Unavailable or AuthError.
    """

    def __init__(self, **options: Any) -> None:
        settings = Settings.of_server(options, "adapter_params")
        if not settings.form:
            raise ConfigError(
                'LMCache over moonpool: adapter_params needs "form": what the bytes of the chunks are, such '
                'as "bfloat16"; LMCache does not tell a native client, and chunks of another type would be '
                "read as these",
                operation="config",
                key="form",
            )
        super().__init__(threads=settings.threads)
        mark = fingerprint(PLUG, {"form": settings.form})
        self._pool = open_pool(
            settings,
            lambda: settings.dial(mark, settings.timeout_s),
            log=log,
            on_joined=self.attach,
            on_left=self.detach,
        )

    def drain_completions(self) -> list[Any]:
        """As the native one; a node that did not answer is left alone by all that comes after."""
        told: list[Any] = super().drain_completions()
        if not self.attached:
            for _, _, error, _ in told:
                if error:
                    self._pool.failed(error)
        return told

    def close(self) -> None:
        """Waits for the copies under way; operations that have not begun never end."""
        super().close()
        self._pool.close()
