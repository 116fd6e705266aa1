"""TLS of the HTTP pages: [cluster] tls_cert, tls_key and tls_ca.

A certificate and its key make every HTTP page of our processes https, and those that replace them are those
of the next connection. A client of such a page trusts tls_ca, or where that is empty, the system's
authorities. control_tls.py does the same for connections to the master.
"""

from __future__ import annotations

import logging
import os
import ssl
import stat
from pathlib import Path

from moonpool.core.config.config import Config
from moonpool.core.config.file_state import file_state
from moonpool.core.errors import ConfigError

_log = logging.getLogger("moonpool.tls")


def server_context(config: Config) -> ssl.SSLContext | None:
    """None where no certificate is configured. Raises ConfigError for files that cannot serve."""
    cluster = config.cluster
    if not cluster.tls_cert and not cluster.tls_key:
        return None
    if not cluster.tls_cert or not cluster.tls_key:
        given, missing = ("tls_cert", "tls_key") if cluster.tls_cert else ("tls_key", "tls_cert")
        raise wrong(f"cluster.{given} is set and cluster.{missing} is not; set both or none", missing)
    check_private_key(Path(cluster.tls_key))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(cluster.tls_cert, cluster.tls_key, password=lambda: b"")
    except (OSError, ValueError) as error:
        raise wrong(
            f"cluster.tls_cert = {cluster.tls_cert} and cluster.tls_key = {cluster.tls_key} cannot be used: "
            f"{_reason(error)}; they must be a certificate in PEM form and its key, without a password",
            "tls_cert",
            error,
        ) from error
    return context


class FollowedContext:
    """server_context(), which follows its files. Those that cannot be used, as a new certificate whose key
    has yet to come, are logged and change nothing until they change again."""

    def __init__(self, config: Config) -> None:
        """Raises ConfigError for files that cannot serve."""
        self._config = config
        self._seen = self._look()  # first: what changes while they are read is read again
        context = server_context(config)
        assert context is not None, "a certificate is configured"
        self._context = context

    def current(self) -> ssl.SSLContext:
        """Of the files as they are now."""
        seen = self._look()
        if seen != self._seen:
            self._seen = seen
            try:
                self._context = server_context(self._config) or self._context
            except ConfigError as error:
                _log.error("%s; the files from before are in use", error)
        return self._context

    def _look(self) -> list[tuple[int, ...]]:
        """Of each file: what another one of that name differs in."""
        return [file_state(file) for file in (self._config.cluster.tls_cert, self._config.cluster.tls_key)]


def followed_context(config: Config) -> FollowedContext | None:
    """As server_context."""
    cluster = config.cluster
    return FollowedContext(config) if cluster.tls_cert or cluster.tls_key else None


def client_context(config: Config) -> ssl.SSLContext:
    """The authorities that clients trust. Raises ConfigError for a file of authorities that cannot serve."""
    file = config.cluster.tls_ca
    try:
        return ssl.create_default_context(cafile=file or None)
    except OSError as error:
        raise wrong(
            f"cluster.tls_ca = {file} cannot be used: {_reason(error)}; "
            f"it must hold certificates in PEM form",
            "tls_ca",
            error,
        ) from error


def own_child_context() -> ssl.SSLContext:
    """For asking a process that we started whether it is ready: certificates are not checked, and nothing
    secret is sent."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def scheme(config: Config) -> str:
    """The scheme of our HTTP pages' URLs: http or https."""
    return "https" if config.cluster.tls_cert else "http"


def check_private_key(key: Path) -> None:
    """Raises ConfigError for a file that is not there, or that others can read."""
    try:
        mode = stat.S_IMODE(key.stat().st_mode)
    except OSError as error:
        raise wrong(f"cannot read cluster.tls_key = {key}: {error.strerror}", "tls_key", error) from error
    if mode & 0o077:
        raise wrong(
            f"cluster.tls_key = {key} can be read by others (mode {mode:04o}); run: chmod 600 {key}",
            "tls_key",
        )


def _reason(error: OSError | ValueError) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or "no certificate").lower().replace("_", " ")
    return (
        os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
    ) or "no PEM"


def wrong(message: str, key: str, cause: Exception | None = None) -> ConfigError:
    """A ConfigError about cluster.``key``."""
    return ConfigError(message, operation="tls", key=f"cluster.{key}", cause=cause)
