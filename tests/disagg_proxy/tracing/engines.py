"""Engines and hand-overs that are traced."""

from __future__ import annotations

from moonpool.disagg_proxy.data_plane.observations import HandoverForm, Observation, Outcome, Stage

ENGINES = ("p0", "d0")
TWO_STEPS = Observation(
    7, 1, 0, 1, 10.0, 10.1, 11.0, 11.1, 11.5, 13.0, 900, 896, 20, 640, 200,
    Outcome.ANSWERED, 1, HandoverForm.TWO_STEP, 1, Stage.ENDED, 1, b"t" * 16, b"p" * 8, b"s" * 8,
)  # fmt: skip
