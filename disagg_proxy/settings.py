"""What a proxy is told at its start: values only, checked once, never changed afterwards.

core/config/proxy_section.py states those of the configuration. Times are in seconds, sizes in bytes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from moonpool._native import HOLDERS_MAX
from moonpool.core.config.proxy_section import SWITCHES, Admission, ProxyCommon
from moonpool.core.service.addresses import Address, parse_address
from moonpool.core.service.http_tls import TlsFiles, client_side_of
from moonpool.disagg_proxy.conductor.admission import Objective
from moonpool.disagg_proxy.conductor.policy import make_policy
from moonpool.disagg_proxy.discovery.allowed_networks import AllowedNetworks
from moonpool.disagg_proxy.discovery.source_url import parse_source_url
from moonpool.disagg_proxy.events.settings import EventSource, PoolSettings
from moonpool.disagg_proxy.peers.settings import PeerSettings
from moonpool.disagg_proxy.setting_error import bad

BOOTSTRAP_PORT = 8998  # where prefill engines have their bootstrap page, unless they are told otherwise
_PORTS = {"http": 80, "https": 443}  # by scheme, of a URL without one
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_RELAY_PATH = re.compile(r"/[A-Za-z0-9_.~/-]*[A-Za-z0-9_~-](/\*)?")
_OWN_PAGES = ("health", "metrics", "engines", "ui", "register", "unregister", "query", "query_by_hash")
_BOOTSTRAP = re.compile(r"(?:([^\s/]+):)?([0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """An engine behind the proxy: a name (header, metrics), its root URL, ``http://host:port`` or https, and
    its role: both, prefill (computes prompts for others) or decode (answers what others have computed).

    bootstrap: where a prefill engine's bootstrap page is, PORT (of the URL's host) or HOST:PORT; 0: it has
    none; "": at BOOTSTRAP_PORT, if anywhere, or, of SGLang, where the engine says.

    numbered: the operator gave it no name, and that which it has says only where it stands in this proxy's
    list.
    """

    name: str
    url: str
    role: str = "both"
    bootstrap: str = ""
    numbered: bool = False

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise bad(
                "engines", f"an engine's name has 1 to 64 letters, digits, '_', '.' or '-', not {self.name!r}"
            )
        if self.role not in ("both", "prefill", "decode"):
            raise bad("engines", f"an engine's role is both, prefill or decode, not {self.role!r}")
        _ = self.address, self.bootstrap_address

    @property
    def address(self) -> tuple[str, int]:
        """(host, port). Raises ConfigError when the URL is none of an HTTP server's root."""
        try:
            parts = urlsplit(self.url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise bad("engines", f"{self.url!r} is no URL: {error}") from error
        if parts.scheme not in _PORTS or not host or not _is_host(host):
            raise bad("engines", f"an engine's URL looks like http://host:port or https, not {self.url!r}")
        default = _PORTS[parts.scheme]
        if parts.path not in ("", "/") or parts.query or parts.fragment or parts.username:
            root = f"{parts.scheme}://{host}:{port or default}"
            raise bad("engines", f"give the root of the engine, {root}, not {self.url!r}")
        return host, default if port is None else port

    @property
    def is_https(self) -> bool:
        """Whether it is spoken to inside TLS; then its certificate must have the host of ``address``."""
        return urlsplit(self.url).scheme == "https"

    @property
    def known_as(self) -> str:
        """To other proxies, whose lists may have another order."""
        return "{}:{}".format(*self.address) if self.numbered else self.name

    @property
    def bootstrap_address(self) -> tuple[str, int] | None:
        """(host, port) of its bootstrap page, None when it has none: without ``bootstrap`` only prefill
        engines have one. Raises ConfigError."""
        if self.role == "decode" and self.bootstrap:
            raise bad("engines", f"a decode engine has no bootstrap page, and {self.name} is one")
        if self.role != "prefill" and not self.bootstrap:
            return None
        parts = _BOOTSTRAP.fullmatch(self.bootstrap or str(BOOTSTRAP_PORT))
        if parts is None or int(parts[2]) > 65535:
            raise bad(
                "prefill",
                f"write #bootstrap=PORT, #bootstrap=HOST:PORT or, for none, #bootstrap=0; not "
                f"{self.bootstrap!r}",
            )
        return ((parts[1] or self.address[0]).strip("[]"), int(parts[2])) if int(parts[2]) else None


@dataclass(frozen=True, slots=True)
class Internals:
    """Bounds and periods of the data plane that no operator sets."""

    prefill_answer_bytes_max: int = 16 << 20  # the answer of a prefill engine, which is read whole
    observations_max: int = 65536  # records of requests that were not fetched yet
    sweep_s: float = 0.25  # how often deadlines are looked at


class AdmissionSettings(Admission, frozen=True, kw_only=True):
    """Which objectives requests are admitted by, and how many of them may wait.

    ttft_slo, gap_slo: to a request's first token, and between two tokens of its answer; 0: any. queue_max:
    so many requests may wait here, each up to ``queue_deadline``; 0: what cannot be taken is refused at once.
    """

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise bad(name, f"{name} is 0 or more, not {value}")
        if self.queue_max and not self.queue_deadline:
            raise bad("queue_deadline", "who may wait needs some time for it: a positive queue_deadline")

    @property
    def any(self) -> bool:
        """Whether a request can be refused or made to wait at all. Without, the dispatcher makes no
        ``Admission``."""
        return bool(self.ttft_slo or self.gap_slo or self.queue_max)

    @property
    def objective(self) -> Objective:
        """The two objectives, with infinity where the setting is 0."""
        any_s = float("inf")
        return Objective(self.ttft_slo or any_s, self.gap_slo or any_s)


class ProxySettings(ProxyCommon, frozen=True, kw_only=True):
    """What a proxy runs with. Raises ConfigError for what cannot be meant. The bounds of single settings are
    those of their definition, which the loader holds.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    take_over: bool = False  # from a proxy that runs there
    engines: tuple[EngineSpec, ...] = ()
    policy: str = "round_robin"  # never auto: from_config.py
    events: tuple[EventSource, ...] = ()  # of engines by their names, and of the pool's nodes
    pool: PoolSettings | None = None  # how further nodes of the pool are found; None: they are not looked for
    admission: AdmissionSettings = AdmissionSettings()
    peers: PeerSettings = PeerSettings()
    process_number: int = 0  # of this one among ``processes``
    internals: Internals = Internals()

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise bad("port", f"a port is 0 to 65535 (0 = any free one), not {self.port}")
        for name in self.discovery:
            parse_source_url(name)
        for path in self.relay_paths:
            _check_relay_path(path)
        for name in self.switch_headers:
            if name not in SWITCHES:
                raise bad("switch_headers", f"a switch is {' or '.join(SWITCHES)}, not {name!r}")
        for name in ("api_keys_file", "discovery_keys_file"):
            if self.clients_file and getattr(self, name):
                raise bad(
                    name,
                    f"clients_file has the keys of all; move those of {getattr(self, name)} to rows of "
                    f"{self.clients_file}, and leave {name} out",
                )
        if self.registers:
            self._check_registers()
        elif self.discovery_keys_file:
            raise bad("discovery_keys_file", "keys of those who may register are for --discovery http alone")
        elif self.discovery_allow:
            raise bad("discovery_allow", "networks of engines that register are for --discovery http alone")
        elif self.discovery_registry_file:
            raise bad("discovery_registry_file", "registrations are kept with --discovery http alone")
        if not self.engines and not self.discovery:
            raise bad(
                "engines",
                "a proxy needs at least one engine; give --engine http://host:port, or --discovery",
            )
        if self.discovery and not len(self.engines) <= self.engines_max <= 65535:
            raise bad(
                "engines_max", f"{len(self.engines)} engines are given, {self.engines_max} may be there"
            )
        self._check_tls()
        self._check_holders()
        roles = {engine.role for engine in self.engines}
        if not self.discovery and "both" not in roles and len(roles) == 1:
            missing = "decode" if "prefill" in roles else "prefill"
            raise bad(missing, f"engines of one role alone; give --{missing} http://host:port, or --engine")
        names = [engine.name for engine in self.engines]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise bad("engines", f"two engines are called {twice[0]!r}; give each its own NAME=URL")
        places = Counter(Address(*each.address) for each in self.engines)
        if again := [str(place) for place, times in places.items() if times > 1]:
            raise bad("engines", f"{again[0]} is given more than once; give each engine once, in one role")
        if self.admission.any and not make_policy(self.policy).uses_tokens:
            raise bad(
                "policy",
                f"admission needs a policy that looks at prompts, such as conductor, not {self.policy}",
            )
        make_policy(self.policy)
        if self.process_listen:
            parse_address(self.process_listen, "proxy.process_listen")
        self._check_handover()
        for source in self.events:
            if not source.pool and source.name not in names and not self.discovery:
                raise bad("events", f"no engine is called {source.name!r}; they are {', '.join(names)}")
            if source.pool and source.name in names:
                raise bad("pool_events", f"{source.name!r} is an engine; give the pool's node another name")
        streams = [source.name for source in self.events]
        if twice := sorted({name for name in streams if streams.count(name) > 1}):
            raise bad("pool_events", f"two event streams are called {twice[0]!r}; give each its own name")
        if self.otlp_endpoint and not re.fullmatch(r"https?://[^\s/]+(/\S*)?", self.otlp_endpoint):
            raise bad("otlp_endpoint", f"spans go to http://host:4318, or https, not {self.otlp_endpoint!r}")
        if not self.health.path.startswith("/") or not self.health.path.isascii() or " " in self.health.path:
            raise bad(
                "health.path", f"the health path is an URL path such as /health, not {self.health.path!r}"
            )

    def _check_tls(self) -> None:
        for names in (("tls_cert", "tls_key"), ("engine_tls_cert", "engine_tls_key")):
            given = [name for name in names if getattr(self, name)]
            missing = [name for name in names if name not in given]
            if given and missing:
                raise bad(
                    missing[0], f"proxy.{given[0]} is set and proxy.{missing[0]} is not; set both or none"
                )
        if self.tls_client_ca and not self.tls_cert:
            raise bad(
                "tls_cert",
                "clients show their certificates inside TLS (tls_client_ca); give the proxy one of its own, "
                "tls_cert and tls_key",
            )

    def _check_holders(self) -> None:
        """Policies that look at prompts know where the blocks of so many lie."""
        engines = max(len(self.engines), self.engines_max if self.discovery else 0)
        if engines + self.pool_nodes <= HOLDERS_MAX or not make_policy(self.policy).uses_tokens:
            return
        most = HOLDERS_MAX - self.pool_nodes
        raise bad(
            "engines_max" if self.discovery else "engines",
            f"{engines:,} engines and {self.pool_nodes:,} nodes of the pool, and {self.policy} looks for "
            f"prompts at {HOLDERS_MAX:,} at most; "
            + (f"set engines_max to {most:,} or less, " if self.discovery and most > 0 else "")
            + "take several proxies, or --policy round_robin",
        )

    def _check_registers(self) -> None:
        AllowedNetworks(self.discovery_allow)
        if self.api_keys_file and not self.discovery_keys_file:
            raise bad(
                "discovery_keys_file",
                "a client's API key must not register engines, which read other clients' prompts; give "
                "--discovery-keys-file with keys of their own for those who may register",
            )
        if not self.loopback and not self.discovery_keys_file and not self.clients_file:
            raise bad(
                "discovery",
                "whoever reaches the proxy could register an engine and read prompts; give "
                "--discovery-keys-file with keys of those who may",
            )
        if not self.loopback and not self.discovery_allow:
            raise bad(
                "discovery_allow",
                "engines register from other hosts here; name the networks that they are in, such as "
                "--discovery-allow 10.0.0.0/8",
            )

    def _check_handover(self) -> None:
        shared = shared_bootstraps(self.engines)
        for engine in self.engines:
            place = engine.bootstrap_address
            if place in shared and (engine.bootstrap or self.handover == "concurrent"):
                raise bad(
                    "prefill",
                    f"several prefill engines would have their bootstrap page at {place[0]}:{place[1]}; give "
                    f"each its own: --prefill {engine.url}#bootstrap=PORT",
                )

    @property
    def registers(self) -> bool:
        """Whether engines may register over HTTP."""
        return "http" in self.discovery

    @property
    def pool_nodes(self) -> int:
        """Whose events are followed."""
        return sum(source.pool for source in self.events)

    @property
    def places(self) -> int:
        """For engines, at one time. Without discovery: as many as there are."""
        if not self.discovery:
            return len(self.engines)
        return self.engines_max

    @property
    def client_tls(self) -> TlsFiles | None:
        """What clients are shown, and whom they must have been signed by; None: they come in plain."""
        return client_side_of(self) if self.tls_cert else None

    @property
    def scheme(self) -> str:
        """Of the proxy's URL: http or https."""
        return "https" if self.tls_cert else "http"

    @property
    def rereads(self) -> bool:
        """Whether SIGHUP has something to read or to open again."""
        keys = self.clients_file or self.api_keys_file or self.discovery_keys_file
        return bool(keys) or self.access_log not in ("", "-")

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the listening address."""
        return Address(self.host, self.port).is_loopback


def shared_bootstraps(engines: Iterable[EngineSpec]) -> frozenset[tuple[str, int]]:
    """Bootstrap addresses that stand for several prefill engines: it is not known whose page that is."""
    places = Counter(engine.bootstrap_address for engine in engines)
    return frozenset(place for place, count in places.items() if place is not None and count > 1)


def read_registrar_keys(settings: ProxySettings) -> list[str]:
    """Of clients that may register engines. Raises ConfigError, also when a client has one of them."""
    keys = read_api_keys(settings.discovery_keys_file)
    if set(keys) & set(read_api_keys(settings.api_keys_file)):
        raise bad(
            "discovery_keys_file",
            f"{settings.discovery_keys_file} and {settings.api_keys_file} have a key in common, so a client "
            f"could register engines and read other clients' prompts; give registrars keys of their own",
        )
    return keys


def read_api_keys(path: str) -> list[str]:
    """One key per line; blank lines and those that begin with '#' are no keys. "": none.

    Raises ConfigError when the file cannot be read or has no key: an empty one must not open the proxy.
    """
    if not path:
        return []
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise bad("api_keys_file", f"the API keys cannot be read from {path}: {error}") from error
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise bad("api_keys_file", f"{path} has no API key; write one per line, or name no file")
    return keys


def parse_tokenizers(texts: Iterable[str]) -> dict[str, Path]:
    """``MODEL=FOLDER`` each. Raises ConfigError."""
    models = {}
    for text in texts:
        model, separator, folder = text.partition("=")
        if not separator or not model or not folder:
            raise bad("tokenizer", f"write MODEL=FOLDER (with tokenizer.json), or none, not {text!r}")
        models[model] = Path(folder)
    return models


def parse_engines(texts: Iterable[str], role: str = "both") -> tuple[EngineSpec, ...]:
    """``URL`` or ``NAME=URL`` each; an engine without a name is called engine-0, engine-1, ... by its
    place (prefill-0, decode-0, ... in these roles). Behind ``#bootstrap=``: see EngineSpec."""
    kind = "engine" if role == "both" else role
    specs = []
    for place, text in enumerate(texts):
        text, _, bootstrap = text.partition("#bootstrap=")
        name, separator, url = text.partition("=")
        numbered = not separator or "://" in name
        if numbered:
            name, url = f"{kind}-{place}", text
        specs.append(EngineSpec(name, url, role, bootstrap, numbered))
    return tuple(specs)


def _is_host(host: str) -> bool:
    """Whether a name can be asked for at all."""
    try:
        return 0 < len(host.encode("idna")) < 254 and not any(each.isspace() for each in host)
    except UnicodeError:
        return False


def _check_relay_path(path: str) -> None:
    if not _RELAY_PATH.fullmatch(path) or any(part in (".", "..", "") for part in path[1:].split("/")):
        raise bad("relay_paths", f"a path looks like /v1/audio/transcriptions or /v1/audio/*, not {path!r}")
    if path.partition("/")[2].partition("/")[0] in _OWN_PAGES:
        raise bad("relay_paths", f"{path} is the proxy's own")
