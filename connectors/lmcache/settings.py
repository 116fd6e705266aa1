"""Where the node is and whose chunks are wanted: from ``moonpool://...``, or from LMCache's own options."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from moonpool.core import paths
from moonpool.core.errors import ConfigError

SCHEME = "moonpool"
_SECRETS = ("token", "cluster_token", "password")
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
THREADS_MAX = 64


@dataclass(frozen=True, slots=True)
class Settings:
    """node: socket path, node name, or None for the default socket; tenant, namespace: whose chunks, see
    docs/keys.md; require_pool: refuse to start without a node; threads: that copy; timeout_s: the longest
    wait without progress."""

    node: str | None = None
    tenant: str = "default"
    namespace: str = "default"
    require_pool: bool = False
    threads: int = 2
    timeout_s: float = 2.0

    @classmethod
    def from_url(cls, url: str) -> Settings:
        """``moonpool://[NODE or /PATH][?tenant=T&namespace=N&...]``. Raises ConfigError."""
        parts = urlsplit(url)
        if parts.username or parts.password:
            raise _secret(url.split("@")[0].split("//")[-1].split(":")[0] + ":...@")
        node = parts.netloc + parts.path.rstrip("/")
        given: dict[str, object] = {}
        for key, value in parse_qsl(parts.query, keep_blank_values=True):
            if key in given or key == "node":
                raise _wrong(key, f"{key} stands twice in {url!r}")
            given[key] = value
        return cls.parse({**given, **({"node": node} if node and node != "localhost" else {})}, url)

    @classmethod
    def parse(cls, given: Mapping[str, object], place: str) -> Settings:
        """From named options; ``place`` says in errors where they stand. Raises ConfigError for an unknown
        name, a secret, or a value of the wrong type."""
        known = [field.name for field in fields(cls)]
        for key in given:
            if key in _SECRETS:
                raise _secret(key)
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(known)}"
                raise _wrong(key, f"{place}: the option {key!r} is not known{hint}")
        default = cls()
        threads = _number("threads", given.get("threads", default.threads))
        if not (threads.is_integer() and 1 <= threads <= THREADS_MAX):
            raise _wrong("threads", f"threads must be a whole number from 1 to {THREADS_MAX}")
        timeout_s = _number("timeout_s", given.get("timeout_s", default.timeout_s))
        if not 0 < timeout_s <= 3600:
            raise _wrong("timeout_s", "timeout_s must be above 0 and at most 3600 seconds")
        node = given.get("node")
        settings = cls(
            None if node is None else _text("node", node),
            _text("tenant", given.get("tenant", default.tenant)),
            _text("namespace", given.get("namespace", default.namespace)),
            _flag("require_pool", given.get("require_pool", False)),
            int(threads),
            timeout_s,
        )
        settings.socket()
        return settings

    def socket(self) -> Path:
        """The Unix socket to connect to. Raises ConfigError for an address of another host."""
        if self.node is None:
            return paths.default_node_socket()
        if "/" in self.node:
            return paths.check_socket_path(Path(self.node))
        if ":" in self.node:
            raise _wrong(
                "node",
                f"node is {self.node!r}: LMCache uses a node of its own host; give the path of its Unix "
                f"socket ({SCHEME}:///path), the node's name, or nothing for the default one",
            )
        return paths.node_socket(self.node)


def _text(key: str, value: object) -> str:
    if isinstance(value, str) and value:
        return value
    raise _wrong(key, f"{key} must be a non-empty text, not {value!r}")


def _flag(key: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in (*_TRUE, *_FALSE):
        return value.lower() in _TRUE
    raise _wrong(key, f"{key} must be true or false, not {value!r}")


def _number(key: str, value: object) -> float:
    try:
        if isinstance(value, int | float | str) and not isinstance(value, bool):
            return float(value)
    except ValueError:
        pass
    raise _wrong(key, f"{key} must be a number, not {value!r}")


def _secret(key: str) -> ConfigError:
    return _wrong(
        key,
        f"{key} is not an option: a secret has no place in a URL or an option; set "
        f"{paths.TOKEN_FILE_VARIABLE} in the environment",
    )


def _wrong(key: str, sentence: str) -> ConfigError:
    return ConfigError(f"LMCache over moonpool: {sentence}", operation="config", key=key)
