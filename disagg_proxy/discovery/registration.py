"""A registration of a publisher of KV events, in the form of Mooncake's conductor. Values only."""

from __future__ import annotations

from typing import Annotated, NamedTuple
from urllib.parse import urlsplit

import msgspec

from moonpool.core.errors import ConfigError
from moonpool.core.service.addresses import parse_address
from moonpool.disagg_proxy.discovery.source import DiscoveredEngine
from moonpool.disagg_proxy.events.settings import EventSource
from moonpool.disagg_proxy.settings import EngineSpec

TENANT = "default"
_TYPES = ("vllm", "sglang")
Text = Annotated[str, msgspec.Meta(max_length=1024)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_Part = Annotated[str, msgspec.Meta(min_length=1, max_length=256, pattern=r"^[^|]*$")]  # of Key's text


class Registration(msgspec.Struct):
    """The body of POST /register: members as Mooncake documents them, and ours: url, role, bootstrap, ttl_s.

    url:             root URL of the engine; "": not an engine, its events are only followed.
    role, bootstrap: as in EngineSpec.
    ttl_s:           seconds until the registration expires unless it is repeated; 0: never.
    """

    instance_id: _Part
    endpoint: Text = ""
    replay_endpoint: Text = ""
    type: Text = "vLLM"
    modelname: Text = ""
    lora_name: Text | None = None
    tenant_id: _Part = TENANT
    block_size: Annotated[int, msgspec.Meta(ge=0, le=65_536)] = 0
    dp_rank: Annotated[int, msgspec.Meta(ge=0, le=65_535)] = 0
    additionalsalt: Text = ""
    url: Text = ""
    role: Text = "both"
    bootstrap: Text | int = ""
    ttl_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0

    @property
    def key(self) -> RegistrationKey:
        """Identity: a second registration with an equal key replaces the first."""
        return RegistrationKey(self.instance_id, self.tenant_id, self.dp_rank)

    def says(self, other: Registration) -> bool:
        """Whether both are equal except for ttl_s."""
        return msgspec.structs.replace(self, ttl_s=other.ttl_s) == other

    def hosts(self) -> list[str]:
        """The hosts that the proxy, or an engine on its behalf, would connect to. Raises ConfigError for a
        malformed address."""
        hosts = [urlsplit(self.url).hostname or ""] if self.url else []
        for endpoint in (self.endpoint, self.replay_endpoint):
            if endpoint:
                hosts.append(parse_address(endpoint.removeprefix("tcp://"), "endpoint").host)
        if isinstance(self.bootstrap, str) and ":" in self.bootstrap:
            hosts.append(parse_address(self.bootstrap, "bootstrap").host)
        return hosts

    def found(self) -> DiscoveredEngine | None:
        """The engine; None: the registration is for events only. Raises ConfigError if it is
        contradictory."""
        if not self.url:
            if not self.endpoint:
                raise ConfigError(
                    "a registration has an endpoint (of KV events), a url (of an engine), or both"
                )
            return None
        spec = EngineSpec(self.instance_id, self.url, self.role, str(self.bootstrap))
        return DiscoveredEngine(spec, self.events(), self.modelname)

    def events(self) -> EventSource | None:
        """The event stream; None: there is none. Raises ConfigError for one that cannot be followed."""
        if not self.endpoint:
            return None
        if self.type.lower() not in _TYPES:
            raise ConfigError(
                f"the events of a publisher of type {self.type!r} cannot be read; vLLM and SGLang can"
            )
        for endpoint in (self.endpoint, self.replay_endpoint):
            if endpoint and not endpoint.startswith("tcp://"):
                raise ConfigError(f"an endpoint is at tcp://host:port, not {endpoint!r}")
        return EventSource(self.instance_id, self.endpoint, self.replay_endpoint)


class RegistrationKey(NamedTuple):
    """Identity of a registration."""

    instance_id: str
    tenant_id: str
    dp_rank: int

    def __str__(self) -> str:
        return f"{self.instance_id}|{self.tenant_id}|{self.dp_rank}"
