"""The sentences of the page."""

from __future__ import annotations

import pytest

from moonpool.disagg_proxy.ui.explain import seconds, why_here, why_miss

from .made import INSTANCES, finished

WEIGHED = {"predicted_ttft_s": 0.42, "wait_s": 0.1, "prefill_s": 0.3, "transfer_s": 0.0, "handover_s": 0.02}


@pytest.mark.parametrize(
    ("made", "sentence"),
    [
        (finished(), "the policy did not say"),
        (finished(why={"load": 3}), "by its load"),
        (
            finished(why={**WEIGHED, "reason": "least_time"}, own=(600, 0, 0), pool=800),
            "its first token was predicted soonest; 0.42 s predicted (wait 0.10 s + compute 0.30 s + "
            "hand-over 20 ms); reuses 600 tokens of its own and 200 from the pool of 1,000",
        ),
        (finished(why={"reason": "only"}), "it was the only one that could"),
        (
            finished(why={"reason": "prefill_busy"}),
            "the engines for prefill were busy, and to compute it here cost less than to wait",
        ),
        (
            finished(why={"reason": "only"}, sent_s=10.3),
            "kept here for 0.30 s; it was the only one that could",
        ),
        (finished(why={"reason": "only"}, sent_s=10.3, attempts=2), "it was the only one that could"),
        (finished(why={"reason": "my_own"}), "my own"),
        (finished(why={"predicted_ttft_s": "odd", "reason": 3}), "its first token was predicted soonest"),
    ],
)
def test_why_here(made: object, sentence: str) -> None:
    assert why_here(made) == sentence  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("made", "sentence"),
    [
        (finished(tokens=0), "its tokens were not known"),
        (finished(own=(980, 0, 0)), ""),
        (finished(own=(600, 0, 0), pool=980), ""),
        (finished(), "no engine held its beginning"),
        (finished(tokens=40), "shorter than what is kept"),
        (finished(own=(512, 0, 0)), "behind 512 tokens it is new"),
        (finished(own=(100, 0, 900)), "p2 held 900 tokens, and going there was predicted to be slower"),
        (finished(own=(100, 0, 0), pool=800, fetch=False), "the pool held 700 tokens more"),
        (finished(own=(980, 0, 0), prompt_tokens=1000, cached_tokens=0), "the engine found 0"),
        (finished(own=(980, 0, 0), prompt_tokens=1000, cached_tokens=900), ""),
        (finished(own=(980, 0, 0), cached_tokens=-1), ""),
    ],
)
def test_why_miss(made: object, sentence: str) -> None:
    said = why_miss(made, INSTANCES)  # type: ignore[arg-type]
    assert said.startswith(sentence) or sentence in said
    assert bool(said) == bool(sentence)


def test_seconds() -> None:
    assert [seconds(value) for value in (0.0, 0.0123, 0.1, 3.14, 42.4)] == [
        "0 ms",
        "12 ms",
        "0.10 s",
        "3.14 s",
        "42 s",
    ]
