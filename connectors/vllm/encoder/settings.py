"""The options of ``ec_connector_extra_config``, checked once at start."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import ClassVar

from moonpool.connectors.options import PoolOptions, flag, optional_text, refuse_unknown, text, wrong
from moonpool.core.config.units import parse_size

PLACE = "ec_connector_extra_config"
SAVE_BYTES_MIN, SAVE_BYTES_MAX = 1 << 20, 64 << 30
Bytes = int


@dataclass(frozen=True, slots=True)
class EncoderSettings(PoolOptions):
    """ec_connector_extra_config, checked.

    save_bytes: bytes of outputs that wait to be stored; those beyond are not stored.
    """

    place: ClassVar[str] = PLACE

    save_bytes: Bytes = 256 << 20

    @classmethod
    def parse(cls, extra: Mapping[str, object]) -> EncoderSettings:
        """Raises ConfigError for an unknown key (naming the nearest) and for a value of the wrong type."""
        known = {field.name: field.type for field in fields(cls)}
        refuse_unknown(PLACE, extra, known)
        values = {key: _READERS[str(known[key])](key, value) for key, value in extra.items()}
        return cls(**values)  # type: ignore[arg-type]


def _bytes(key: str, value: object) -> int:
    try:
        size = parse_size(str(value)) if not isinstance(value, bool) else -1
    except ValueError:
        size = -1
    if SAVE_BYTES_MIN <= size <= SAVE_BYTES_MAX:
        return size
    raise wrong(PLACE, key, f"must be a size from 1MiB to 64GiB, such as 256MiB, not {value!r}")


_READERS: Mapping[str, Callable[[str, object], object]] = {
    "bool": functools.partial(flag, PLACE),
    "str": functools.partial(text, PLACE),
    "str | None": functools.partial(optional_text, PLACE),
    "Bytes": _bytes,
}
