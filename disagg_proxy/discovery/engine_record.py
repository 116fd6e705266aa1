"""An engine as files and etcd write it: one small table."""

from __future__ import annotations

import re

import msgspec

from moonpool.core.errors import ConfigError
from moonpool.disagg_proxy.discovery.source import DiscoveredEngine
from moonpool.disagg_proxy.events.settings import EventSource
from moonpool.disagg_proxy.settings import EngineSpec

_NO_NAME = re.compile(r"[^A-Za-z0-9_.-]+")


class EngineRecord(msgspec.Struct, forbid_unknown_fields=True):
    """An EngineSpec as text, with the engine's event stream and model.

    url:             root URL of the engine.
    name:            unique name; "": made of host and port.
    role, bootstrap: as in EngineSpec.
    events, replay:  endpoints of its KV events; "": none.
    model:           model id; "": taken from /v1/models.
    """

    url: str
    name: str = ""
    role: str = "both"
    bootstrap: str | int = ""
    events: str = ""
    replay: str = ""
    model: str = ""

    def found(self, name: str = "") -> DiscoveredEngine:
        """The engine that the record describes. name: used if the record has none. Raises ConfigError for a
        contradictory record."""
        called = self.name or name or name_of(self.url)
        spec = EngineSpec(called, self.url, self.role, str(self.bootstrap))
        if self.replay and not self.events:
            raise ConfigError(f"{called} has a replay endpoint and no events", operation="discovery")
        events = EventSource(called, self.events, self.replay) if self.events else None
        return DiscoveredEngine(spec, events, self.model)


def name_of(text: str) -> str:
    """A valid name made of a URL's host and port, or of any text; at most 64 characters."""
    return _NO_NAME.sub("-", text.removeprefix("http://").removeprefix("https://").rstrip("/")).strip("-")[
        -64:
    ]
