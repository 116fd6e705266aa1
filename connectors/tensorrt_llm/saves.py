"""The saves of a rank that are under way, and the pages that they still read.

    submitted --staged--> its pages are free --answered--> over        a KV cache on a device
    submitted --------------answered---------> over                    a KV cache on the host

Until then ``MoonpoolScheduler.request_finished`` keeps the pages, and a step that writes to one of them all
the same (TensorRT-LLM may free a page without asking, for example one that a window has passed) waits.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from moonpool import _native
from moonpool.connectors.tensorrt_llm.kv_memory import pages_by_group
from moonpool.connectors.tensorrt_llm.messages import Save
from moonpool.connectors.tensorrt_llm.pool import PoolClient

ASK_AGAIN_S = 0.0005  # a wait for a save is rare, and then as long as some megabytes take over the link


@dataclass(slots=True)
class Saving:
    """A save under way.

    pages: that it still reads, see kv_memory.page_keys.
    """

    save: Save
    client: PoolClient
    pages: set[int]


class Saves:
    """Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: dict[int, Saving] = {}  # by ticket
        self._client: PoolClient | None = None  # there is at most one in the life of an engine
        self._over: list[tuple[Saving, _native.SaveAnswer]] = []

    @property
    def held(self) -> Counter[int]:
        """By layer group, how many pages are still read."""
        with self._lock:
            return sum((pages_by_group(saving.pages) for saving in self._under_way.values()), Counter())

    def start(self, saving: Saving, submit: Callable[[_native.Worker], int]) -> None:
        """Hands a save over. Raises Error when that cannot be.

        submit: to the client's worker; returns the ticket.
        """
        with self._lock:  # its end must not be known before its ticket is
            self._client = saving.client
            self._under_way[submit(saving.client.saves)] = saving

    def poll(self) -> list[tuple[Saving, _native.SaveAnswer]]:
        """The saves that have ended since the last call."""
        with self._lock:
            self._poll()
            over, self._over = self._over, []
        return over

    def requests(self) -> set[int]:
        """The requests whose pages are still read, as of the last poll."""
        with self._lock:
            return {saving.save.request_id for saving in self._under_way.values() if saving.pages}

    def wait_for(self, pages: Collection[int] | None, closing: threading.Event) -> bool:
        """Waits until no save reads one of ``pages`` (None: any page), or ``closing`` is set. Returns whether
        that was a wait."""
        waited = False
        while True:
            with self._lock:
                if self._reads(pages):
                    self._poll()
                if not self._reads(pages):
                    return waited
            waited = True
            if closing.wait(ASK_AGAIN_S):
                return waited

    @property
    def idle(self) -> bool:
        """Whether all saves have ended, as of the last poll."""
        with self._lock:
            return not self._under_way

    def _reads(self, pages: Collection[int] | None) -> bool:
        return any(
            saving.pages and (pages is None or not saving.pages.isdisjoint(pages))
            for saving in self._under_way.values()
        )

    def _poll(self) -> None:
        """With the lock."""
        if self._client is None or not self._under_way:
            return
        answers: list[tuple[int, Any]] = self._client.saves.poll()
        for ticket, answer in answers:
            if isinstance(answer, _native.SaveStaged):
                self._under_way[ticket].pages = set()
            else:
                self._over.append((self._under_way.pop(ticket), answer))
