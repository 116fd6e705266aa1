"""Headers that say whose a request is, how urgent, and by when it is wanted."""

from __future__ import annotations

import math

import pytest

from moonpool.core.errors import ConfigError
from moonpool.disagg_proxy.conductor.admission import Objective, Refusal
from moonpool.disagg_proxy.dispatch import request_hints
from moonpool.disagg_proxy.dispatch.pending import too_many
from moonpool.disagg_proxy.dispatch.request_hints import BadHeader
from moonpool.disagg_proxy.settings import AdmissionSettings


def read(**headers: bytes) -> request_hints.RequestHints:
    return request_hints.read({name.replace("_", "-"): value for name, value in headers.items()})


def test_who_says_nothing_is_like_everybody() -> None:
    assert read() is request_hints.NO_HINTS
    assert request_hints.read(None) is request_hints.NO_HINTS
    assert read(decision=b"1") is request_hints.NO_HINTS
    usual = Objective(3.0, 0.1)
    assert request_hints.NO_HINTS.objective(usual) == usual


def test_what_is_said() -> None:
    found = read(tenant=b"team-a", priority=b"-3", session=b"s/1", ttft_slo=b"2.5", gap_slo=b"0")
    assert found[:3] == ("team-a", -3, "s/1")
    assert found.objective(Objective(30.0, 0.1)) == Objective(2.5, math.inf)
    assert read(ttft_slo=b"7").objective(Objective(30.0, 0.1)) == Objective(7.0, 0.1)


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ({"tenant": b""}, "Tenant is a name"),
        ({"tenant": b"a b"}, "Tenant is a name"),
        ({"tenant": b"x" * 129}, "Tenant is a name"),
        ({"session": b"\xff"}, "Session is a name"),
        ({"priority": b"high"}, "whole number from -100 to 100"),
        ({"priority": b"101"}, "whole number"),
        ({"priority": b"1.5"}, "whole number"),
        ({"ttft_slo": b"nan"}, "TTFT-SLO is a number of seconds"),
        ({"ttft_slo": b"-1"}, "TTFT-SLO"),
        ({"gap_slo": b"1e3"}, "Gap-SLO"),
        ({"gap_slo": b"inf"}, "Gap-SLO"),
    ],
)
def test_nonsense_is_told(headers: dict[str, bytes], words: str) -> None:
    with pytest.raises(BadHeader, match=words):
        read(**headers)


def test_a_refusal_says_when_to_come_again_in_whole_seconds() -> None:
    def retry_after(seconds: float) -> bytes:
        return dict(too_many(Refusal("ttft", seconds, "it is late")).headers)[b"Retry-After"]

    assert [retry_after(each) for each in (0.0, 0.2, 1.01, 59.9, math.inf)] == [
        b"1",
        b"1",
        b"2",
        b"60",
        b"3600",
    ]
    assert too_many(Refusal("ttft", 2.0, "it is late")).status == 429


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: AdmissionSettings(ttft_slo=-1), "ttft_slo is 0 or more"),
        (lambda: AdmissionSettings(gap_slo=math.nan), "gap_slo is 0 or more"),
        (lambda: AdmissionSettings(queue_max=5, queue_deadline=0), "positive queue_deadline"),
    ],
)
def test_settings_that_cannot_be_meant(make: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()  # type: ignore[operator]
