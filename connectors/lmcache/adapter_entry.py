"""How LMCache's in-process mode finds the remote connector, and the checks before there is one: which options
apply, and whether an engine may share what it would store."""

from __future__ import annotations

from typing import Any

from lmcache.v1.exceptions import IrrecoverableException
from lmcache.v1.storage_backend.connector import ConnectorAdapter, ConnectorContext

from moonpool.connectors.lmcache.layout_check import ambiguous
from moonpool.connectors.lmcache.remote_connector import MoonpoolConnector
from moonpool.connectors.lmcache.settings import SCHEME, Settings
from moonpool.connectors.options import wrong
from moonpool.core.errors import Error

_PLUGIN = f"plugin://{SCHEME}"
_OPTIONS = "remote_storage_plugin."
# Where to find our class: LMCache's own options, beside ours under the same prefix.
_NOT_OURS = ("module_path", "class_name")


class MoonpoolAdapter(ConnectorAdapter):  # type: ignore[misc]
    """Makes the connector for ``moonpool://...`` and for ``remote_storage_plugins: ["moonpool"]``."""

    def __init__(self) -> None:
        super().__init__(f"{SCHEME}://")

    def can_parse(self, url: str) -> bool:
        """Whether ``url`` is ``moonpool://...`` or the plugin of this name."""
        return bool(super().can_parse(url)) or url == _PLUGIN or url.startswith(f"{_PLUGIN}.")

    def create_connector(self, context: ConnectorContext) -> MoonpoolConnector:
        """Raises IrrecoverableException, which LMCache lets through, for wrong options, for what cannot be
        right with any remote backend, and without a node where one is required.
        """
        try:
            settings = settings_of(context)
            refuse(context.config, context.metadata, settings)
            return MoonpoolConnector(context, settings)
        except Error as error:
            raise IrrecoverableException(str(error)) from error


def settings_of(context: ConnectorContext) -> Settings:
    """The settings from the URL, or from the options of the plugin; options of its instance override those of
    its type.

    Raises ConfigError.
    """
    if not context.url.startswith("plugin://"):
        return Settings.from_url(context.url)
    extra = (context.config.extra_config if context.config is not None else None) or {}
    name = context.url.removeprefix("plugin://")
    given: dict[str, object] = {}
    for owner in dict.fromkeys((SCHEME, name)):
        prefix = f"{_OPTIONS}{owner}."
        for key, value in extra.items():
            option = key.removeprefix(prefix)
            if key != option and "." not in option and option not in _NOT_OURS:
                given[option] = value
    return Settings.parse(given, f"{_OPTIONS}{SCHEME}")


def refuse(config: Any, metadata: Any, settings: Settings) -> None:
    """Raises ConfigError where an engine would compute with KV that is not its own."""
    if config.use_layerwise:
        raise wrong(
            "LMCache over moonpool",
            "use_layerwise",
            "must be off: LMCache then promises all layers of a chunk as soon as the first one is there, and "
            "one that is evicted or lost meanwhile would be computed with unread",
        )
    if ambiguous([metadata.kv_dtype]) and not settings.form:
        raise wrong(
            "LMCache over moonpool",
            "form",
            f"is needed: this KV cache is {metadata.kv_dtype}, as which several types of 8 bits are kept; "
            f'chunks of another one would be read as these; say which, such as "fp8_e4m3"',
        )
