"""The configuration: one typed, frozen object, made once at start and handed down.

Each value comes from the last of these that names it, and remembers which; sections.py states the settings:

    the default  <  a TOML file (--config FILE, else MOONPOOL_CONFIG)  <  MOONPOOL_SECTION_KEY  <  an argument

A key that does not exist is an error that names it, its place and the nearest right name. The cluster token
comes from a file or the environment, never from an argument, where other users of the host would see it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from moonpool.core.config.cluster_token import TOKEN_BYTES_GOOD, check_token, read_token
from moonpool.core.config.config_sources import Origin, load_sections, show_value
from moonpool.core.config.paths import client_token, default_node_socket, read_or_create_token
from moonpool.core.config.proxy_section import Proxy
from moonpool.core.config.sections import SECTIONS, Cluster, Log, Master, Node, Up
from moonpool.core.config.setting import settings_of
from moonpool.core.errors import ConfigError


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of one process. ``origins`` maps "section.key" to where the value came from."""

    cluster: Cluster = Cluster()
    node: Node = Node()
    master: Master = Master()
    proxy: Proxy = Proxy()
    up: Up = Up()
    log: Log = Log()
    origins: dict[str, Origin] = {}

    def origin(self, key: str) -> Origin:
        """Where the value of "section.key" came from."""
        return self.origins.get(key, Origin("default"))

    def read_token(self) -> bytes:
        """The cluster token: as configured, else the one that the processes of this user on this host share.

        Raises ConfigError when a file cannot serve, or when the environment gives both a token and a file.
        """
        return self._secret("token")

    def client_token(self, socket: str = "") -> bytes:
        """What to show the node at ``socket`` ("": the host's default one), or its cluster: the tenant's key
        or else the cluster token where one is configured, else what stands beside the socket.
        """
        if self.cluster.tenant_key_file and self.origin("cluster.token_file").kind != "argument":
            return read_token(Path(self.cluster.tenant_key_file), name="tenant-key")
        if self.token_is_configured:
            return self.read_token()
        return client_token(socket or default_node_socket())

    def warn_of_short_token(self, log: logging.Logger) -> None:
        """For processes that listen: a token that a person chose may be too short to be a secret."""
        if self.token_is_configured and len(self.read_token()) < TOKEN_BYTES_GOOD:
            log.warning(
                "the cluster token has fewer than %d characters and can be guessed from one recorded "
                "handshake; make one with: openssl rand -hex 32",
                TOKEN_BYTES_GOOD,
            )

    def read_admin_token(self) -> bytes:
        """What admin actions must show: as configured, else a file that the processes of this user on this
        host share.
        """
        return self._secret("admin_token")

    def _secret(self, name: str) -> bytes:
        secret: str = getattr(self.cluster, name)
        file: str = getattr(self.cluster, f"{name}_file")
        variable = f"MOONPOOL_CLUSTER_{name.upper()}"
        by = self.origin(f"cluster.{name}_file").kind
        if secret and by not in ("environment", "argument"):
            return check_token(secret.encode(), f"the variable {variable}")
        if secret and by == "environment":
            raise ConfigError(
                f"both {variable} and {variable}_FILE are set; unset one of them",
                operation="token",
                key=f"cluster.{name}",
            )
        return read_or_create_token(file or None, env={}, name=name.replace("_", "-"))

    @property
    def token_is_configured(self) -> bool:
        """Whether a person chose the cluster token; one that was made on demand does not count."""
        return bool(self.cluster.token or self.cluster.token_file)

    def rows(self) -> Iterator[tuple[str, str, str]]:
        """(key, value, origin) of each setting, in the order of the documentation. A secret shows only that
        it is set.
        """
        for section, kind in SECTIONS.items():
            for each in settings_of(kind):
                key, value = f"{section}.{each.name}", each.value_in(getattr(self, section))
                yield key, show_value(each.type, value), str(self.origin(key))


def load(
    file: str | Path | None = None,
    *,
    env: Mapping[str, str] | None = None,
    arguments: Mapping[str, object] | None = None,
) -> Config:
    """The configuration of this process.

    file: a TOML file; None takes MOONPOOL_CONFIG, when that is set. arguments: "section.key" -> value, of the
    options that were given; a None is an option that was not given. Raises ConfigError for anything unknown,
    malformed or out of range, with the name, its place and the remedy.
    """
    sections, origins = load_sections(
        SECTIONS,
        file=file,
        env=os.environ if env is None else env,
        arguments={key: value for key, value in (arguments or {}).items() if value is not None},
    )
    return Config(**sections, origins=origins)
