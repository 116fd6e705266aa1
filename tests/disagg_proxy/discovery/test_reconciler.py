"""What the log hears of sources."""

from __future__ import annotations

import pytest

from moonpool.disagg_proxy.discovery.membership import Membership
from moonpool.disagg_proxy.discovery.reconciler import Reconciler
from moonpool.disagg_proxy.discovery.source import DiscoveredEngine, SourceListener
from moonpool.disagg_proxy.settings import EngineSpec
from tests.disagg_proxy.harness import until, with_deadline


class Fleet:
    room = 8

    def join(self, found: DiscoveredEngine) -> None:
        pass

    def leave(self, name: str) -> None:
        pass


class Said:
    """A source that says what the test says."""

    name = "said"

    def __init__(self) -> None:
        self.listener: SourceListener | None = None

    async def run(self, listener: SourceListener) -> None:
        self.listener = listener
        listener.found(FOUND)


FOUND = [DiscoveredEngine(EngineSpec(name, f"http://{name}:1")) for name in ("a", "b")]


@with_deadline
async def test_a_source_that_suddenly_names_nobody_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    source = Said()
    reconciler = Reconciler([source], Membership([source.name]), Fleet())
    await reconciler.start()
    await until(lambda: source.listener is not None)
    assert source.listener is not None
    source.listener.found(FOUND[:1])
    source.listener.found([], {"a"})  # one after the other, on purpose
    source.listener.found(FOUND)
    assert "names no engine" not in caplog.text
    source.listener.found([])
    source.listener.found([])
    await reconciler.close()
    assert caplog.text.count("said names no engine any more; the 2 that it named leave") == 1
