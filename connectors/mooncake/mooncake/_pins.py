"""Hard pins: they keep objects from eviction while a store is open, as long as readers can still get them.

Another process may remove or replace a pinned object, and the pin would keep the old bytes in memory for
nothing. So a thread checks the pins now and then, and a put that finds the pool full does so, too.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from moonpool.core.errors import Error
from moonpool.core.store.types import Presence

from ._codes import code_of

if TYPE_CHECKING:
    from moonpool.core.store.store import Store
    from moonpool.core.store.types import Pin

    from ._base import Base

LOOK_S = 5.0
LOOK_AGAIN_S = 0.25  # in a pool that is full
KEYS_A_LOOK = 1024

Answer = list[tuple[Presence, "Pin | None"]]
Ask = Callable[[Callable[["Store"], Answer]], Answer]


class HardPins:
    """The hard pins of one store, by key. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pins: dict[bytes, Pin] = {}
        self._stop: threading.Event | None = None
        self._looked_s = 0.0

    def hold(self, name: bytes, pin: Pin, store: Base) -> None:
        """For ``store``, whom the thread does not keep alive."""
        with self._lock:
            old, self._pins[name] = self._pins.get(name), pin
            if self._stop is None:
                self._stop = threading.Event()
                watch = threading.Thread(
                    target=_watch, args=(weakref.ref(store), self._stop), name="mooncake-pins", daemon=True
                )
                watch.start()
        if old is not None:
            old.release()

    def release(self, names: Iterable[bytes]) -> None:
        """Ends the pins of these objects."""
        for name in names:
            with self._lock:
                pin = self._pins.pop(name, None)
            if pin is not None:
                pin.release()

    def release_all(self) -> None:
        """And ends the thread."""
        with self._lock:
            pins, self._pins = self._pins, {}
            stop, self._stop = self._stop, None
        if stop is not None:
            stop.set()
        for pin in pins.values():
            pin.release()

    def look_again(self, ask: Ask) -> bool:
        """look() for a pool that is full; whether to put again: not when that was tried a moment ago."""
        if not self._pins or time.monotonic() < self._looked_s + LOOK_AGAIN_S:
            return False
        self.look(ask)
        return True

    def look(self, ask: Ask) -> None:
        """Pins each object again, which ends pins on old bytes and on objects that are gone. Raises Error."""
        self._looked_s = time.monotonic()
        with self._lock:
            names = list(self._pins)
        for start in range(0, len(names), KEYS_A_LOOK):
            some = names[start : start + KEYS_A_LOOK]

            def pinned(store: Store, some: list[bytes] = some) -> Answer:
                return [pinned_one(store, name) for name in some]

            for name, (presence, pin) in zip(some, ask(pinned), strict=True):
                self._renew(name, presence, pin)

    def _renew(self, name: bytes, presence: Presence, pin: Pin | None) -> None:
        if presence is Presence.UNKNOWN:
            return
        with self._lock:
            old = self._pins.pop(name, None)
            if old is not None and pin is not None:
                self._pins[name] = pin
        if unwanted := old or pin:  # the new one when this store removed it meanwhile
            unwanted.release()


def pinned_one(store: Store, name: bytes) -> tuple[Presence, Pin | None]:
    """Whether the object is there, and a pin on it if so."""
    (presence,), pin = store.exists([name], pin=True)
    return presence, pin


def _watch(reference: weakref.ref[Base], stop: threading.Event) -> None:
    while not stop.wait(LOOK_S):
        store = reference()
        if store is None:
            return
        try:
            store._hard_pins.look(store._ask)
        except Error as error:
            code_of(error, "hard_pin")
        del store
