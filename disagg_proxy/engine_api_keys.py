"""The API key that the proxy sends to each engine as ``Authorization: Bearer KEY``. A client's own key goes
to no engine: an engine could use it in the client's name.

The file has one line for each key; blank lines and those that begin with '#' are ignored:

    KEY             for the engines of the proxy's own settings
    NAME KEY        for the engine of this name
    HOST:PORT KEY   for the engine at this address
    * KEY           for all engines, discovered ones, too: a client that registers an engine gets this key

The most specific line counts, in this order: address, name, KEY, ``* KEY``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from moonpool.disagg_proxy.setting_error import bad
from moonpool.disagg_proxy.settings import EngineSpec

_GIVEN = ""
_bad = partial(bad, "engine_key_file")


class EngineKeys:
    """The keys that the proxy sends to engines."""

    def __init__(self, keys: Mapping[str, str]) -> None:
        """keys: by name, by HOST:PORT, "*", or "" (see above)."""
        self._keys = dict(keys)

    def of(self, spec: EngineSpec, *, given: bool) -> str:
        """The key for an engine; "": none. given: whether the engine is one of the proxy's own settings."""
        places = ["{}:{}".format(*spec.address), spec.name, *([_GIVEN] if given else []), "*"]
        return next((self._keys[place] for place in places if place in self._keys), "")


def read_engine_keys(path: str) -> EngineKeys:
    """Reads the file; path "": no keys. Raises ConfigError for an unreadable file or a malformed line."""
    keys: dict[str, str] = {}
    if not path:
        return EngineKeys(keys)
    try:
        lines = Path(path).read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise _bad(f"the keys of engines cannot be read from {path}: {error}") from error
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        name = words[0] if len(words) == 2 else _GIVEN
        if len(words) > 2 or not words[-1].isprintable():
            raise _bad(f"line {number} of {path} is neither KEY nor NAME KEY")
        if name in keys:
            raise _bad(f"line {number} of {path} gives {name or 'the engines of the settings'} another key")
        keys[name] = words[-1]
    if not keys:
        raise _bad(f"{path} has no key; write KEY or NAME KEY per line, or name no file")
    return EngineKeys(keys)
