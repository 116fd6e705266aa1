"""The options that every connector has: which node, and whose blocks. ``place`` is where the user wrote them,
for the sentences of errors."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from moonpool.core.config import paths
from moonpool.core.errors import ConfigError

if TYPE_CHECKING:
    from moonpool import _native

SECRETS = ("token", "cluster_token")


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """Where the pool is, and whose blocks an engine uses.

    node: socket path, node name, or None for the default socket.
    require_pool: whether the engine refuses to start without a node.
    tenant, namespace: whose blocks; docs/keys.md has both.
    """

    place: ClassVar[str] = "options"

    node: str | None = None
    require_pool: bool = False
    tenant: str = "default"
    namespace: str = "default"

    def socket(self) -> Path:
        """The Unix socket to connect to. Raises ConfigError for an address of another host."""
        if self.node is None:
            return paths.default_node_socket()
        if "/" in self.node:
            return paths.check_socket_path(Path(self.node))
        if ":" in self.node:
            raise wrong(
                self.place,
                "node",
                f"is {self.node!r}: an engine uses a node of its own host; give the path of its Unix socket, "
                f"or leave it out for the default one",
            )
        return paths.node_socket(self.node)

    def dial(self, fingerprint: bytes, timeout_s: float) -> _native.Client:
        """Connects under a fingerprint.

        timeout_s: longest wait without progress, in seconds.

        Raises Unavailable without a node, AuthError when the token does not fit.
        """
        from moonpool import _native
        from moonpool.core.service.data_tls import pool_tls_of

        socket = str(self.socket())
        tls = pool_tls_of(socket)
        client = _native.Client(
            socket,
            paths.client_token(socket),
            self.tenant,
            self.namespace,
            fingerprint,
            timeout_s,
            tls=tls.control,
            data_tls=tls.data,
        )
        client.connect()
        return client


def refuse_unknown(place: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raises ConfigError for a key that is none of ``known``, naming the nearest, and for a secret."""
    names = list(known)
    for key in given:
        if key in SECRETS:
            raise wrong(
                place,
                key,
                f"is not an option: a secret has no place on a command line; set "
                f"{paths.TOKEN_FILE_VARIABLE} in the environment",
            )
        if key not in names:
            near = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"the options are {', '.join(names)}"
            raise ConfigError(f"{place} has an unknown key {key!r}; {hint}", operation="config", key=key)


def text(place: str, key: str, value: object) -> str:
    """``value`` if it is a non-empty str. Raises ConfigError that names ``place`` and ``key``."""
    if isinstance(value, str) and value:
        return value
    raise wrong(place, key, f"must be a non-empty text, not {value!r}")


def optional_text(place: str, key: str, value: object) -> str | None:
    """As ``text``; None stays None."""
    return None if value is None else text(place, key, value)


def flag(place: str, key: str, value: object) -> bool:
    """A bool, or "true" or "false" in any case. Raises ConfigError that names ``place`` and ``key``."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise wrong(place, key, f"must be true or false, not {value!r}")


def wrong(place: str, key: str, sentence: str) -> ConfigError:
    """The error for the option ``key`` of ``place``."""
    return ConfigError(f"{place}.{key} {sentence}", operation="config", key=key)
