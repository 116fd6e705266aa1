"""The environment variables that choose what SGLang does over moonpool."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from moonpool.core.errors import ConfigError

PD = "MOONPOOL_SGLANG_PD"
EMBEDDINGS = "MOONPOOL_SGLANG_EMBEDDINGS"
NODE = "MOONPOOL_SGLANG_NODE"
LISTEN = "MOONPOOL_SGLANG_LISTEN"
TRANSPORTS = "MOONPOOL_SGLANG_TRANSPORTS"

_ON = ("1", "true", "yes", "on")
_OFF = ("", "0", "false", "no", "off")
_LISTEN = re.compile(r"(?P<host>\[[^\[\]]+\]|[^:\[\]]*)(:(?P<first>\d{1,5})(-(?P<last>\d{1,5}))?)?")
_PORT_MAX = 65_535


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of SGLang's transfers.

    host: where the engine listens; "": at the address that SGLang passes.
    ports: the engine uses the first free one; 0: any.
    transports: allowed transports, best first; None: all that work here.
    """

    host: str = ""
    ports: range = range(1)
    transports: tuple[str, ...] | None = None

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Settings:
        """Raises ConfigError for a value that is none."""
        names = tuple(name.strip() for name in environment.get(TRANSPORTS, "").split(",") if name.strip())
        return cls(*_listen(environment.get(LISTEN, "").strip()), names or None)


def _listen(text: str) -> tuple[str, range]:
    found = _LISTEN.fullmatch(text)
    if found is not None:
        first = int(found["first"] or 0)
        last = int(found["last"] or first)
        if first <= last <= _PORT_MAX:
            return found["host"].strip("[]"), range(first, last + 1)
    raise _wrong(LISTEN, f"{text!r} is none of host, host:port, host:first-last and :first-last")


def is_on(name: str, environment: Mapping[str, str]) -> bool:
    """Raises ConfigError for a value that is neither yes nor no."""
    value = environment.get(name, "").strip().lower()
    if value not in _ON + _OFF:
        raise _wrong(name, f"{value!r} is neither 1 nor 0")
    return value in _ON


def _wrong(name: str, what: str) -> ConfigError:
    return ConfigError(f"{name}: {what}", operation="config", key=name)
