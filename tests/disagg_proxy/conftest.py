"""What all tests of the proxy share: /metrics says what is true now."""

from __future__ import annotations

import math

import pytest

from moonpool.disagg_proxy.endpoints import metrics


@pytest.fixture(autouse=True)
def _metrics_are_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that was work is shown again for a while: a pause of the garbage collector counts as work."""
    monkeypatch.setattr(metrics, "CHEAP_S", math.inf)
