"""TLS by Python's ssl: of the HTTP pages, by [cluster] tls_cert, tls_key and tls_ca, and of other files.

A certificate and its key make every HTTP page of our processes https, and those that replace them are those
of the next connection. A client of such a page trusts tls_ca, or where that is empty, the system's
authorities. control_tls.py does the same for connections to the master.
"""

from __future__ import annotations

import logging
import os
import socket
import ssl
import stat
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from moonpool.core.config.config import Config
from moonpool.core.config.file_state import file_state
from moonpool.core.config.proxy_section import ProxyCommon
from moonpool.core.errors import ConfigError

_log = logging.getLogger("moonpool.tls")


class TlsFiles(NamedTuple):
    """The PEM files of one side, "": none, and the settings that name them. cert and key: what it shows; ca:
    the authorities that it trusts."""

    cert: str = ""
    key: str = ""
    ca: str = ""
    cert_setting: str = "cluster.tls_cert"
    key_setting: str = "cluster.tls_key"
    ca_setting: str = "cluster.tls_ca"


def files_of(config: Config) -> TlsFiles:
    """Those of [cluster]."""
    return TlsFiles(config.cluster.tls_cert, config.cluster.tls_key, config.cluster.tls_ca)


def client_side_of(proxy: ProxyCommon) -> TlsFiles:
    """Those of a proxy towards its clients."""
    names = ("proxy.tls_cert", "proxy.tls_key", "proxy.tls_client_ca")
    return TlsFiles(proxy.tls_cert, proxy.tls_key, proxy.tls_client_ca, *names)


def engine_side_of(proxy: ProxyCommon) -> TlsFiles:
    """Those of a proxy towards its engines."""
    names = ("proxy.engine_tls_cert", "proxy.engine_tls_key", "proxy.engine_tls_ca")
    return TlsFiles(proxy.engine_tls_cert, proxy.engine_tls_key, proxy.engine_tls_ca, *names)


def server_context(config: Config) -> ssl.SSLContext | None:
    """None where no certificate is configured. Raises ConfigError for files that cannot serve."""
    files = files_of(config)
    return serving(files) if files.cert or files.key else None


def serving(files: TlsFiles) -> ssl.SSLContext:
    """Shows ``cert`` to clients, which need none. Raises ConfigError for files that cannot serve."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    _show(context, files)
    return context


def asking(files: TlsFiles) -> ssl.SSLContext:
    """Trusts ``ca``, "": the system's authorities, and shows ``cert``, "": nothing. Raises ConfigError for
    files that cannot be used."""
    try:
        context = ssl.create_default_context(cafile=files.ca or None)
    except OSError as error:
        raise wrong(
            f"{files.ca_setting} = {files.ca} cannot be used: {_reason(error)}; "
            f"it must hold certificates in PEM form",
            files.ca_setting,
            error,
        ) from error
    # As the C++ side has it, which asks the same servers: a name is an alternative name, and a chain goes up
    # to an authority that signed itself. What Python sets here differs from version to version.
    context.hostname_checks_common_name = False
    context.verify_flags &= ~(ssl.VERIFY_X509_PARTIAL_CHAIN | ssl.VERIFY_X509_STRICT)
    if files.cert or files.key:
        _show(context, files)
    return context


def _show(context: ssl.SSLContext, files: TlsFiles) -> None:
    if not files.cert or not files.key:
        names = (files.cert_setting, files.key_setting)
        given, missing = names if files.cert else names[::-1]
        raise wrong(f"{given} is set and {missing} is not; set both or none", missing)
    check_private_key(Path(files.key), files.key_setting)
    try:
        context.load_cert_chain(files.cert, files.key, password=lambda: b"")
    except (OSError, ValueError) as error:
        raise wrong(
            f"{files.cert_setting} = {files.cert} and {files.key_setting} = {files.key} cannot be used: "
            f"{_reason(error)}; they must be a certificate in PEM form and its key, without a password",
            files.cert_setting,
            error,
        ) from error


class FollowedContext:
    """serving(files) or asking(files), which follows its files. Those that cannot be used, as a new
    certificate whose key has yet to come, are logged and change nothing until they change again."""

    def __init__(self, files: TlsFiles, make: Callable[[TlsFiles], ssl.SSLContext] = serving) -> None:
        """Raises ConfigError for files that cannot be used."""
        self._files = files
        self._make = make
        self._seen = self._look()  # first: what changes while they are read is read again
        self._context = make(files)

    def current(self) -> ssl.SSLContext:
        """Of the files as they are now."""
        seen = self._look()
        if seen != self._seen:
            self._seen = seen
            try:
                self._context = self._make(self._files)
            except ConfigError as error:
                _log.error("%s; the files from before are in use", error)
        return self._context

    def _look(self) -> list[tuple[int, ...]]:
        """Of each file: what another one of that name differs in."""
        return [file_state(file) for file in (self._files.cert, self._files.key, self._files.ca)]


def followed_context(config: Config) -> FollowedContext | None:
    """As server_context."""
    files = files_of(config)
    return FollowedContext(files) if files.cert or files.key else None


def client_context(config: Config) -> ssl.SSLContext:
    """The authorities that clients trust. Raises ConfigError for a file of authorities that cannot serve."""
    return asking(TlsFiles(ca=config.cluster.tls_ca))


def own_child_context() -> ssl.SSLContext:
    """For asking a process that we started whether it is ready: certificates are not checked, and nothing
    secret is sent."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def own_proxy_context(config: Config) -> ssl.SSLContext | None:
    """For asking this host's own proxy: trusts the very certificate that it shows, whatever name it is for.
    None: the proxy is in plain. Raises ConfigError for a file that cannot be used."""
    if not config.proxy.tls_cert:
        return None
    context = _OneCertificate(ssl.PROTOCOL_TLS_CLIENT)
    context.trust(_first_certificate(config.proxy.tls_cert, "proxy.tls_cert"))
    return context


class _OneCertificate(ssl.SSLContext):
    """Accepts a server that shows one certificate, whatever name it is for and whichever authority has signed
    it, and no other one: those behind it in a chain vouch for others, too."""

    _trusted = b""

    def trust(self, certificate: bytes) -> None:
        """In DER form."""
        self.check_hostname = False
        self.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # one that another authority has signed
        self.load_verify_locations(cadata=certificate)
        self._trusted = certificate

    def wrap_socket(
        self,
        sock: socket.socket,
        server_side: bool = False,
        do_handshake_on_connect: bool = True,
        suppress_ragged_eofs: bool = True,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLSocket:
        """With its handshake, before anything is sent. Raises SSLCertVerificationError for another one."""
        inside = super().wrap_socket(
            sock, server_side, True, suppress_ragged_eofs, server_hostname=server_hostname, session=session
        )
        if inside.getpeercert(binary_form=True) != self._trusted:
            inside.close()
            raise ssl.SSLCertVerificationError("it shows another certificate")
        return inside


def _first_certificate(file: str, setting: str) -> bytes:
    """In DER form; in a chain it is the server's own. Raises ConfigError."""
    try:
        text = Path(file).read_text("ascii", errors="replace")
        begin = text.index(ssl.PEM_HEADER)
        end = text.index(ssl.PEM_FOOTER, begin) + len(ssl.PEM_FOOTER)
        return ssl.PEM_cert_to_DER_cert(text[begin:end])
    except (OSError, ValueError) as error:
        reason = _reason(error) if isinstance(error, OSError) else "no certificate"
        raise wrong(
            f"{setting} = {file} cannot be used: {reason}; it must be a certificate in PEM form",
            setting,
            error,
        ) from error


def own_proxy_url(config: Config) -> str:
    """Of this host's own proxy."""
    return f"{'https' if config.proxy.tls_cert else 'http'}://{config.proxy.listen}"


def scheme(config: Config) -> str:
    """The scheme of our HTTP pages' URLs: http or https."""
    return "https" if config.cluster.tls_cert else "http"


def check_private_key(key: Path, setting: str = "cluster.tls_key") -> None:
    """Raises ConfigError for a file that is not there, or that others can read. A key of root's may be
    readable for a group, as those of Kubernetes' secrets are: a process of another user could not read it
    otherwise."""
    try:
        status = key.stat()
        mode = stat.S_IMODE(status.st_mode)
    except OSError as error:
        raise wrong(f"cannot read {setting} = {key}: {error.strerror}", setting, error) from error
    if mode & (0o037 if status.st_uid == 0 and os.geteuid() != 0 else 0o077):
        raise wrong(
            f"{setting} = {key} can be read by others (mode {mode:04o}); run: chmod 600 {key}", setting
        )


def _reason(error: OSError | ValueError) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or "no certificate").lower().replace("_", " ")
    return (
        os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
    ) or "no PEM"


def wrong(message: str, key: str, cause: Exception | None = None) -> ConfigError:
    """A ConfigError about the setting ``key``."""
    return ConfigError(message, operation="tls", key=key, cause=cause)
