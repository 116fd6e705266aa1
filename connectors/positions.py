"""What an engine's positions are: rope and its scaling, as the model's config states them, and what the
engine makes of them by the longest sequence that it serves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from moonpool.core.store.keys import Json

FIELDS = (
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "rope_local_base_freq",
    "partial_rotary_factor",
    "max_position_embeddings",
    "original_max_position_embeddings",
)
# Kinds whose angles are a function of the config alone, in every engine that we know.
_LENGTH_FREE = frozenset(
    (
        *("default", "linear", "ntk", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling"),
        *("mrope", "bailing_mrope", "openpangu", "proportional", "mllama4"),
    )
)
_LONG = frozenset({"longrope", "su"})


def length_factors(config: Mapping[str, Any], length: int | None) -> Json:
    """What ``length``, the most tokens that a sequence of this engine has, changes in the angles; None:
    nothing.

    config: the fields of the text model's config. Engines choose between the two sets of factors of longrope
    by comparing ``length`` with the original length. Of the kinds that are not known here the length itself
    counts, so that two engines never share by mistake.
    """
    found: set[str] = set()
    for rope in _ropes(config):
        kind = kind_of(rope)
        if kind in _LENGTH_FREE or (kind == "dynamic" and "alpha" in rope):  # alpha: a fixed factor
            continue
        original = rope.get(
            "original_max_position_embeddings", config.get("original_max_position_embeddings")
        )
        if kind in _LONG and original and length is not None:
            found.add(f"{kind}: {'long' if length > int(original) else 'short'} factors")
        else:
            found.add(f"{kind}: for {length} tokens")
    return sorted(found) or None


def varying_kind(config: Mapping[str, Any]) -> str:
    """The first kind of rope whose angles may depend on the length of the sequence that is computed, where an
    engine runs the model by Hugging Face's own code; "": none."""
    kinds = sorted({kind_of(rope) for rope in _ropes(config)} & (_LONG | {"dynamic"}))
    return kinds[0] if kinds else ""


def kind_of(rope: Mapping[str, Any]) -> str:
    """The name of the rope type, "default" where the configuration has none."""
    return str(rope.get("rope_type") or rope.get("type") or "default")


def _ropes(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Each set of rope parameters: a config has one, or one for each kind of layer."""
    for name in ("rope_parameters", "rope_scaling"):
        given = config.get(name)
        if isinstance(given, Mapping):
            nested = [one for one in given.values() if isinstance(one, Mapping)]
            yield from nested or [given]
