"""The cluster token: one secret, or two while one replaces the other.

A process proves the first and believes peers that prove any. A token that was read from a file is followed:
where the file was replaced, the process proves and believes what it holds from then on. The C++ core does the
same (core/csrc/wire/secrets.hpp).
"""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

from moonpool.core.config.file_state import file_state
from moonpool.core.errors import ConfigError

TOKEN_BYTES_MAX = 4096
TOKEN_BYTES_GOOD = 16  # one that is shorter can be guessed from one recorded handshake
_WHITE = b" \t\r\n\v\f"
_log = logging.getLogger("moonpool.token")


class ClusterToken(bytes):
    """The text of a token. file: which it was read from and which is followed; "": it does not change."""

    file: str
    _seen: tuple[int, ...]
    _secrets: tuple[bytes, ...]

    def __new__(cls, text: bytes, file: str = "", seen: tuple[int, ...] = ()) -> ClusterToken:
        """Raises ConfigError where ``text`` holds no secret. seen: of the file, before it was read."""
        token = super().__new__(cls, text)
        token.file, token._seen = file, seen
        token._secrets = _secrets_in(text, f"the cluster token file {file}")
        return token

    def secrets(self) -> tuple[bytes, ...]:
        """As the file has them now. Why one cannot be used is logged once, and changes nothing; nor does a
        file that is gone, as that beside a node's socket while the node is restarted."""
        seen = file_state(self.file)
        if seen and seen != self._seen:
            try:
                found = read_token(Path(self.file))
                if found._secrets != self._secrets:
                    for secret in found._secrets:
                        _check_length(secret, f"the cluster token file {self.file}")
                # Both of one look, whatever another thread stores meanwhile.
                self._seen, self._secrets = found._seen, found._secrets
            except ConfigError as error:
                self._seen = seen
                _log.error("%s; the secrets from before are in use", error)
        return self._secrets


def secrets_of(token: bytes) -> tuple[bytes, ...]:
    """The secrets of ``token`` as they are now, the one to prove first."""
    return token.secrets() if isinstance(token, ClusterToken) else _secrets_in(token, "the cluster token")


def secret_after(tried: bytes, token: bytes) -> bytes:
    """What to prove where ``tried`` was in vain: the next secret of ``token``, or its first, which is
    ``tried`` where there is no other."""
    known = secrets_of(token)
    return known[(known.index(tried) + 1) % len(known)] if tried in known else known[0]


def read_token(path: Path, *, name: str = "token") -> ClusterToken:
    """The token in the file ``path``. Raises ConfigError when it cannot serve as a secret."""
    what = f"the {'cluster token' if name == 'token' else name.replace('-', ' ')} file {path}"
    key = f"cluster.{name.replace('-', '_')}_file"
    seen = file_state(str(path))  # first: what changes while it is read is read again
    try:
        with open(path, "rb") as file:
            info = os.fstat(file.fileno())
            text = file.read(TOKEN_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(
            f"cannot read {what}: {error.strerror}",
            operation="token",
            key=key,
            peer=str(path),
            cause=error,
        ) from error
    if stat.S_IMODE(info.st_mode) & 0o077:
        raise ConfigError(
            f"{what} can be read by others (mode {stat.S_IMODE(info.st_mode):04o}); run: chmod 600 {path}",
            operation="token",
            key=key,
            peer=str(path),
        )
    return ClusterToken(check_token(text, what), str(path.absolute()), seen)


def check_token(token: bytes, place: str) -> bytes:
    """``token`` without the white space around it; raises ConfigError, which names ``place``, when it is
    empty or too long, or when its two secrets are too short.
    """
    if len(token) <= TOKEN_BYTES_MAX:
        token = token.strip(_WHITE)
    if not token:
        raise ConfigError(
            f"{place} is empty; put a random secret there, for example the output of: openssl rand -hex 32",
            operation="token",
            key="cluster.token_file",
        )
    if len(token) > TOKEN_BYTES_MAX:
        raise ConfigError(
            f"{place} holds more than {TOKEN_BYTES_MAX} bytes",
            operation="token",
            key="cluster.token_file",
            bytes=len(token),
        )
    _secrets_in(token, place)
    return token


def check_token_length(token: bytes, listens: str, key: str) -> None:
    """Raises ConfigError for a token that can be guessed: one recorded handshake is enough to try them all.
    Called where other hosts reach a port; ``listens``: its setting and address.
    """
    if len(token) < TOKEN_BYTES_GOOD:
        raise ConfigError(
            f"{listens} can be reached from other hosts, and the cluster token has {len(token)} bytes, where "
            f"fewer than {TOKEN_BYTES_GOOD} can be guessed; make one with: openssl rand -hex 32",
            operation="token",
            key=key,
            bytes=len(token),
        )


def _secrets_in(text: bytes, place: str) -> tuple[bytes, ...]:
    """The lines of ``text``, one or two. Bytes that are no text, or more lines, are one secret."""
    is_text = all(0x20 <= byte < 0x7F or byte in _WHITE for byte in text)
    lines = tuple(line.strip(_WHITE) for line in text.split(b"\n") if line.strip(_WHITE)) if is_text else ()
    if len(lines) != 2:
        return (text,)
    for line in lines:
        _check_length(line, f"{place} holds two secrets, of which one")
    return lines


def _check_length(secret: bytes, place: str) -> None:
    """Of a secret that replaces another: a short line is a slip, not a secret."""
    if len(secret) < TOKEN_BYTES_GOOD:
        raise ConfigError(
            f"{place} has {len(secret)} bytes: give each secret at least {TOKEN_BYTES_GOOD}",
            operation="token",
            key="cluster.token_file",
            bytes=len(secret),
        )
