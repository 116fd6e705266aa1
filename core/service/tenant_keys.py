"""The tenants' own keys, as a running node or master has them: read from ``cluster.tenants_file``, handed to
the native server, and again where the file changes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from moonpool.core.config.tenants_file import (
    NativeLimits,
    TenantsFile,
    native_limits,
    native_rows,
    salts_of,
)
from moonpool.core.errors import ConfigError, InvalidArgument

if TYPE_CHECKING:
    from moonpool.core.config.config import Config

FOLLOW_S = 1.0  # between two looks at the file


TakeLimits = Callable[[Sequence[NativeLimits]], None]


class TakesTenants(Protocol):
    """A native server whose services tenants' keys open."""

    def set_tenants(self, rows: Sequence[tuple[str, str, Sequence[str]]]) -> None:
        """(tenant, role, keys) of each row."""


def tenants_of(config: Config) -> TenantsFile | None:
    """The file that is configured, if any. Raises ConfigError."""
    file = config.cluster.tenants_file
    return TenantsFile(file) if file else None


class TenantKeys:
    """Follows the file until close(), on a thread of its own.

    take_limits: of a node, set_limits(); those that the file has at first it was made with."""

    def __init__(
        self,
        file: TenantsFile,
        server: TakesTenants,
        log: logging.Logger,
        take_limits: TakeLimits | None = None,
    ) -> None:
        self._file = file
        self._server = server
        self._take_limits = take_limits
        self._limits = native_limits(file.rows)  # in force, or refused with a sentence
        self._log = log
        self._salts = salts_of(file.rows)  # as the server hashes with them until it ends
        self._said = ""  # the error that the last look ended with
        self._closed = threading.Event()
        server.set_tenants(native_rows(file.rows))
        self._in_force = file.rows
        self._thread = threading.Thread(target=self._follow, name="tenant-keys", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Returns when the server is not touched any more."""
        self._closed.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._closed.wait(FOLLOW_S):
            try:
                self._look()
                self._said = ""
            except ConfigError as error:
                self._say(str(error))
            # Without this thread keys that are removed would go on. Its text may have a key in it.
            except Exception as error:
                self._say(f"the file of tenants cannot be followed now: {type(error).__name__}")

    def _look(self) -> None:
        self._file.reread()
        rows = self._file.rows
        if rows == self._in_force:
            return
        self._server.set_tenants(native_rows(rows))
        self._in_force = rows
        if self._take_limits is not None and (limits := native_limits(rows)) != self._limits:
            try:
                self._take_limits(limits)
            except InvalidArgument as error:
                self._log.error("%s; the tenants' limits from before are in use", error)
            self._limits = limits
        self._log.info("%d rows of tenants are in force", len(rows), extra={"event": "tenants"})
        if salts_of(rows) != self._salts:
            self._log.warning(
                "the file of tenants has other salts: they come into force with a restart, which has to "
                "be that of all nodes together"
            )

    def _say(self, sentence: str) -> None:
        """Once, where each look ends the same."""
        if sentence != self._said:
            self._log.error("%s; the tenants' keys from before are in use", sentence)
        self._said = sentence
