"""``Publication``: keeps the name of one engine in a store, on a thread of its own, until close().

    claim()  ->  start()  ->  a renewal each quarter of a lease; after a failure, a back-off  ->  close()

The thread waits on the steady clock, and each renewal writes the whole entry where it is missing: after a
store lost its data, and after this process was stopped for longer than a lease, the name is published again.
"""

from __future__ import annotations

import atexit
import logging
import random
import threading
import time
import weakref

from moonpool.core.errors import AuthError, ConfigError, Error
from moonpool.core.transfer.metadata.backend import Metadata, NameTaken
from moonpool.core.transfer.metadata.record import SegmentRecord

RENEWALS_PER_LEASE = 4
BACKOFF_S = 0.25
NOTICE_S = 2.0  # a store may notice so much later that a lease has ended
LOOK_AGAIN_S = 0.25
RISE_SHARE = 1 / 16  # a lease of which so much more is left than before was renewed
CLOSE_S = 5.0
_log = logging.getLogger("moonpool.transfer.metadata")


class Publication:
    """One name in one store. problem: "" while it is published, else why not, in one sentence."""

    def __init__(self, store: Metadata, record: SegmentRecord) -> None:
        self._store = store
        self._record = record
        self._renew_s = store.lease_s / RENEWALS_PER_LEASE
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="moonpool-metadata", daemon=True)
        self._failures = 0  # in a row
        self.problem = f"{record.name} is not published yet"
        self.publishes = 0
        self.failures = 0

    def claim(self) -> None:
        """The first publication. Of an engine that has ended, its lease is waited for. Raises NameTaken when
        the holder lives, AuthError when the store refuses us; anything else is left to the thread.
        """
        give_up_s = time.monotonic() + self._store.lease_s + NOTICE_S
        least_s, dead = float("inf"), ""
        while True:
            try:
                self._publish(dead)
                return
            except NameTaken as taken:
                if taken.left_s > least_s + RISE_SHARE * self._store.lease_s or time.monotonic() > give_up_s:
                    raise
                least_s = min(least_s, taken.left_s)
                if not dead and (dead := self._dead_one(taken.held)):
                    continue
            except (AuthError, ConfigError):
                raise
            except Error as error:
                self._failed(error)
                return
            time.sleep(LOOK_AGAIN_S)

    def start(self) -> None:
        """Begins to renew."""
        _RUNNING.add(self)
        self._thread.start()

    def close(self) -> None:
        """Withdraws the name and ends the thread. Does nothing the second time, and in a child of fork(),
        which has no such thread."""
        if self._stop.is_set():
            return
        self._stop.set()
        _RUNNING.discard(self)
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)

    def _dead_one(self, held: SegmentRecord | None) -> str:
        """The id of a holder that listened, on this host, where this engine listens now: it has ended."""
        mine = self._record
        if held is not None and held.host_id == mine.host_id and set(held.addresses) & set(mine.addresses):
            return held.id
        return ""

    def _run(self) -> None:
        while not self._stop.wait(self._pause_s()):
            try:
                self._publish()
            except Exception as error:  # of a caller's own store, too: a thread that ends would lose the name
                self._failed(error)
        if not self.problem:
            try:
                self._store.withdraw(self._record)
            except Exception as error:
                _log.info("%s: the name %s stays until its lease ends", error, self._record.name)

    def _pause_s(self) -> float:
        """Spread, so that the engines of a store that comes back do not all ask at once."""
        if not self._failures:
            return self._renew_s * random.uniform(0.8, 1.0)
        doubled_s = BACKOFF_S * 2.0 ** min(self._failures - 1, 32)
        return min(doubled_s, self._store.lease_s) * random.uniform(0.5, 1.0)

    def _publish(self, dead: str = "") -> None:
        self._store.publish(self._record, dead=dead)
        self.publishes += 1
        if self._failures:
            _log.warning("the name %s is published again in %s", self._record.name, self._store.shown)
        self._failures = 0
        self.problem = ""

    def _failed(self, error: Exception) -> None:
        """Told once for each outage."""
        self.failures += 1
        self._failures += 1
        if self._failures == 1:
            _log.warning(
                "the name %s is not published: %s; peers that know this engine go on, and it is tried again",
                self._record.name,
                error,
            )
        self.problem = str(error) or type(error).__name__


# At the end of the interpreter the threads that close() waits for stand still: so it comes before.
_RUNNING: weakref.WeakSet[Publication] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for publication in list(_RUNNING):
        publication.close()
