"""The tenants' own keys, as a running node or master has them: read from ``cluster.tenants_file``, handed to
the native server, and again where the file changes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from moonpool.core.config.tenants_file import (
    NativeLimits,
    TenantRow,
    TenantsFile,
    native_limits,
    native_rows,
    salts_of,
)
from moonpool.core.errors import ConfigError, Error, InvalidArgument

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
        self._said_of_limits = ""  # and that with which limits were taken
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
        if rows != self._in_force:
            self._take_keys(rows)
        # Behind the keys, and at each look: a busy node takes them at a later one.
        self._look_at_limits(native_limits(rows))

    def _look_at_limits(self, limits: list[NativeLimits]) -> None:
        if self._take_limits is None or limits == self._limits:
            return
        sentence = ""
        try:
            self._take_limits(limits)
            self._limits = limits
        except InvalidArgument as error:
            sentence = str(error)
            self._limits = limits  # the same would be refused again
        except Error as error:
            sentence = f"{error}; that is tried again"
        if sentence and sentence != self._said_of_limits:
            self._log.error("%s; the tenants' limits from before are in use", sentence)
        self._said_of_limits = "" if limits == self._limits else sentence

    def _take_keys(self, rows: list[TenantRow]) -> None:
        self._server.set_tenants(native_rows(rows))
        self._in_force = rows
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
