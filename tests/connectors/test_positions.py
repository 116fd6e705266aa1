from __future__ import annotations

from typing import Any

import pytest

from moonpool.connectors.positions import length_factors, varying_kind

LONG = {"rope_type": "longrope", "original_max_position_embeddings": 2048}


@pytest.mark.parametrize(
    ("config", "short", "long"),
    [
        ({}, None, None),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4}}, None, None),
        ({"rope_parameters": {"rope_type": "dynamic", "alpha": 1000}}, None, None),
        ({"rope_parameters": LONG}, ["longrope: short factors"], ["longrope: long factors"]),
        (
            {"rope_scaling": {"type": "su"}, "original_max_position_embeddings": 2048},
            ["su: short factors"],
            ["su: long factors"],
        ),
        (
            {"rope_scaling": {"type": "longrope"}},
            ["longrope: for 2048 tokens"],
            ["longrope: for 4096 tokens"],
        ),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2}},
            ["dynamic: for 2048 tokens"],
            ["dynamic: for 4096 tokens"],
        ),
        ({"rope_parameters": {"rope_type": "new"}}, ["new: for 2048 tokens"], ["new: for 4096 tokens"]),
        (
            {"rope_parameters": {"full_attention": LONG, "sliding_attention": {"rope_type": "default"}}},
            ["longrope: short factors"],
            ["longrope: long factors"],
        ),
    ],
)
def test_what_the_length_changes(config: dict[str, Any], short: object, long: object) -> None:
    assert length_factors(config, 2048) == short
    assert length_factors(config, 4096) == long


def test_kinds_that_vary_with_the_batch() -> None:
    assert varying_kind({"rope_parameters": LONG}) == "longrope"
    assert varying_kind({"rope_scaling": {"type": "dynamic", "factor": 2}}) == "dynamic"
    assert varying_kind({"rope_parameters": {"rope_type": "llama3"}, "rope_scaling": None}) == ""
