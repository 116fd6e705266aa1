"""The state of one engine on the Python side; its connections and its breaker belong to the relay."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from moonpool.disagg_proxy.conductor.liveness import Liveness
from moonpool.disagg_proxy.engines.bootstrap import Bootstrap
from moonpool.disagg_proxy.engines.bootstrap_conflicts import BootstrapConflicts
from moonpool.disagg_proxy.engines.sglang import HEALTH_S, MODES, BootstrapAddress, ServerInfo
from moonpool.disagg_proxy.settings import BOOTSTRAP_PORT, EngineSpec, ProxySettings

if TYPE_CHECKING:
    from moonpool._native import Relay
    from moonpool.disagg_proxy.tls import EngineTls

_OTHER_MAKERS = ("sglang", "tensorrt_llm")

_log = logging.getLogger("moonpool.proxy")


class _Card(msgspec.Struct):
    owned_by: str = ""


class Engine:
    """One engine of the fleet.

    place:   its number in the relay and in the prefix indexes, stable.
    role:    both, prefill or decode.
    host:    value of the HTTP Host field.
    models:  ids that its /v1/models lists, each with its JSON; None: unknown.
    bootstrap: bootstrap page of a prefill engine, for the concurrent form; None: none is used.
    meeting: where it can be met in the one-shot form; None: nowhere.
    sglang:  whether it is an SGLang engine; None: unknown since it entered the rotation.
    waits:   whether its health check may take SGLang's time, because it is, or last was, an SGLang engine;
             None: unknown.
    alone:   whether it can answer without another engine's prefill.
    context: members of a JSON object that tell generation servers how to reach this context server of
             TensorRT-LLM; None: unknown, or not needed (asks_context).
    """

    def __init__(
        self,
        place: int,
        spec: EngineSpec,
        settings: ProxySettings,
        conflicts: BootstrapConflicts | None = None,
    ) -> None:
        """conflicts: tracks all engines of the fleet; None: those of the settings."""
        self.place = place
        self.name = spec.name
        self.url = spec.url
        self.role = spec.role
        self.address = spec.address
        self.host = host_field(*spec.address)
        self.liveness = Liveness(settings.health.timeouts_max)
        self.models: dict[str, bytes] | None = None
        self.named: dict[str, bytes] | None = None  # models that its source gave; /v1/models overrides them
        self.conflicts = BootstrapConflicts(settings.engines) if conflicts is None else conflicts
        self.bootstrap = bootstrap_of(spec, settings, self.conflicts)
        self.bootstrap_server: BootstrapAddress | None = None
        self.self_sufficient = True
        self.relay: Relay | None = None
        self.key = ""  # API key that the proxy sends to it
        self.tls: EngineTls | None = None  # None: it is spoken to in plain
        self.turned: Callable[[Engine, bool], None] = lambda engine, healthy: None
        self.became: Callable[[Engine], None] = lambda engine: None
        self._resolved: tuple[str, int] | None = None
        self.spec = spec
        self._settings = settings
        self._warned = False
        self._maker = ""
        self.context: bytes | None = None
        self.asks_context = settings.handover == "generation_first" and spec.role == "prefill"
        self._asks = settings.handover not in ("two_step", "context_first", "generation_first")
        self.sglang: bool | None = None if self._asks else False
        self.waits: bool | None = None if self._asks else False
        if settings.handover == "one_shot" and spec.role != "both":
            self._is_sglang(spec.role, None)

    @property
    def takes_switches(self) -> bool:
        """Whether it may be told ``ProxyRequest.switches``: it is not known to be another engine than vLLM's.
        Connectors of others cannot be told, and TensorRT-LLM's refuses the member."""
        by_number = self._settings.handover in ("context_first", "generation_first")
        return not (self.sglang or by_number or self._maker in _OTHER_MAKERS)

    def attach_relay(self, relay: Relay) -> None:
        """Sets the relay that sends requests to the engine."""
        self.relay = relay
        self._tell_role()

    def load(self) -> int:
        """Number of requests in flight."""
        return 0 if self.relay is None else self.relay.in_flight(self.place)

    def rests(self, now_s: float) -> bool:
        """Whether it failed requests lately, so that other engines are preferred."""
        return self.relay is not None and self.relay.rests_until(self.place) > now_s

    def answered_well(self, peer: tuple[str, int] | None = None) -> None:
        """A health check succeeded. peer: the address that answered; requests go there from now on."""
        if self.relay is not None:
            if peer is not None and peer != self._resolved:
                self._resolved = peer
                self.relay.engine_address(self.place, *peer)
            self.relay.engine_state(self.place, True, "")
        if self.liveness.succeeded(self._now()):
            self.turned(self, True)
            _log.info("engine %s (%s) is healthy", self.name, self.url)

    def answered_late(self, why: str) -> None:
        """A health check timed out. why: the reason."""
        if self.relay is not None:
            self.relay.engine_late(self.place)
        if self.liveness.timed_out(self._now(), why):
            self._leave(why)

    def not_checked(self) -> None:
        """A health check could not be made, for a reason on this host: the engine keeps its state."""
        if self.liveness.healthy and self.relay is not None:
            self.relay.engine_state(self.place, True, "")

    def refused(self, why: str) -> None:
        """The engine certainly does not serve. why: the reason."""
        if self.liveness.refused(self._now(), why):
            self._leave(why)

    def set_models(self, models: dict[str, bytes] | None) -> None:
        """Sets the content of /v1/models; None: it could not be read."""
        models = self.named if models is None else models
        if models != self.models:
            self.models = models
            self._maker = _maker_of(models or {})
            if self.relay is not None:
                self.relay.engine_models(self.place, None if models is None else list(models))
            self.became(self)

    def set_context(self, context: bytes | None) -> None:
        """Sets ``context``, from /server_info of a context server."""
        if context is None and not self._warned:
            self._warned = True
            _log.warning(
                "context server %s (%s) does not say how it is met (GET /server_info), so it is asked first, "
                "and the generation server then",
                self.name,
                self.url,
            )
        self.context = context

    def set_server_info(self, info: ServerInfo | None) -> None:
        """Sets the content of /server_info; None: there is none, so it is not an SGLang engine."""
        self.sglang = self.waits = info is not None or not self.self_sufficient
        if info is None:
            return
        role = MODES.get(info.disaggregation_mode, "both")
        if role != self.spec.role and self.spec.role != "both":
            _log.warning(
                "engine %s (%s) was given as %s, and says that its disaggregation mode is %s: it is %s",
                self.name,
                self.url,
                self.spec.role,
                info.disaggregation_mode,
                role,
            )
        self._is_sglang(role, info.disaggregation_bootstrap_port)
        _log.info("engine %s (%s) is SGLang's: %s", self.name, self.url, role)

    def check_integrity(self) -> None:
        """Raises AssertionError when an invariant of a part is broken."""
        self.liveness.check_integrity()
        if self.bootstrap is not None:
            self.bootstrap.check_integrity()

    def _is_sglang(self, role: str, port: int | None) -> None:
        """Makes it an SGLang engine. port: of its bootstrap server; None: unknown."""
        self.role, self.self_sufficient = role, role == "both"
        host, told = self.spec.address[0], None
        if self.spec.bootstrap and self.spec.bootstrap_address is not None:
            host, told = self.spec.bootstrap_address
        self.bootstrap_server = (
            BootstrapAddress(host, told or port or BOOTSTRAP_PORT) if role == "prefill" else None
        )
        self.waits = True
        self._tell_role()
        if self.bootstrap_server is not None and not self._warned:
            self._warned = True
            if far := self.conflicts.cut_off((self.bootstrap_server.host, self.bootstrap_server.port)):
                _log.warning(
                    "%s (%s) would be told to meet engine %s at %s:%d, on this host alone, and then waits in "
                    "vain; name the engine by an address that decode engines reach, too, or its bootstrap "
                    "server, --prefill %s#bootstrap=HOST:PORT",
                    far.name,
                    far.url,
                    self.name,
                    self.bootstrap_server.host,
                    self.bootstrap_server.port,
                    self.url,
                )
        self.became(self)

    def _tell_role(self) -> None:
        if self.relay is None:
            return
        patience_s = 0.0 if self.self_sufficient else HEALTH_S * self._settings.health.timeouts_max
        self.relay.engine_role(self.place, self.role, patience_s)

    def _leave(self, why: str) -> None:
        if self.relay is not None:
            self.relay.engine_state(self.place, False, why)
        if self.bootstrap is not None:
            self.bootstrap.engine_left()
        if self._asks:
            self.sglang = None  # another program may come back
        self.context = None
        self.turned(self, False)
        _log.warning("engine %s (%s) leaves the rotation: %s", self.name, self.url, why)

    def _now(self) -> float:
        return time.monotonic() if self.relay is None else self.relay.now()


def _maker_of(models: Mapping[str, bytes]) -> str:
    """The program that serves these models, as their cards in /v1/models have it; "": they do not say."""
    for card in models.values():
        with suppress(msgspec.MsgspecError):
            return msgspec.json.decode(card, type=_Card).owned_by
    return ""


def bootstrap_of(
    spec: EngineSpec, settings: ProxySettings, conflicts: BootstrapConflicts
) -> Bootstrap | None:
    """The bootstrap page for hand-overs from this engine; None: it has none, or one that is not usable.
    conflicts: tracks all engines."""
    place = spec.bootstrap_address
    if place is None or settings.handover not in ("auto", "concurrent"):
        return None
    if conflicts.is_shared(place):
        _log.info(
            "engine %s: prefill and decode take two steps, because other prefill engines would have their "
            "bootstrap page at %s:%d, too; give each its own, --prefill %s#bootstrap=PORT",
            spec.name,
            *place,
            spec.url,
        )
        return None
    if far := conflicts.cut_off(place):
        _log.warning(
            "engine %s: prefill and decode take two steps, because %s (%s) would be told to meet it at "
            "%s:%d, on this host alone; name the engine by an address that decode engines reach, too, or "
            "its page, --prefill %s#bootstrap=HOST:PORT (0: there is none)",
            spec.name,
            far.name,
            far.url,
            *place,
            spec.url,
        )
        return None
    expected = bool(spec.bootstrap) or settings.handover == "concurrent"
    return Bootstrap(
        spec.name,
        place,
        expected=expected,
        retry_s=settings.health.interval_s,
        pages=conflicts.pages,
    )


def host_field(host: str, port: int) -> str:
    """The value of a Host field; names with non-ASCII letters in DNS form."""
    name = f"[{host}]" if ":" in host else host
    return f"{name if name.isascii() else name.encode('idna').decode()}:{port}"
