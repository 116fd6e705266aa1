"""Variables named MOONPOOL_... that are no setting: which one was meant, if any, and one warning for each.

A token file that is not read, or a size that is not taken, must not pass without a word.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

PREFIX = "MOONPOOL_"
# Read by something else: the connectors, the bench, and the scripts and tests of this repository.
_OTHERS = tuple(
    PREFIX + name
    for name in (
        "BENCH",
        "BUILD_JOBS",
        "CACHE",
        "SGLANG_",
        "SSD_SIZE",
        "STARTED_AT",
        "TENSORRT_LLM",
        "TEST_",
        "TRACES",
        "WERROR",
    )
)
# Words of others for what we call differently.
_WORDS = {
    "PORT": "LISTEN",
    "ADDRESS": "LISTEN",
    "ADDR": "LISTEN",
    "HOST": "LISTEN",
    "MEMORY": "DRAM",
    "SIZE": "DRAM",
}
_SECTIONS = ("CLUSTER", "NODE", "MASTER", "PROXY", "LOG", "UP")  # the likeliest first
_log = logging.getLogger("moonpool.config")
_warned: set[str] = set()


def is_foreign(variable: str) -> bool:
    """Whether ``variable`` belongs to something else of ours."""
    return variable.startswith(_OTHERS) or variable.endswith("_PYTHON")


def meant(variable: str, known: Iterable[str]) -> str | None:
    """The setting's variable that ``variable`` stands for where only its section, or one word, is wrong."""
    names = set(known)
    rest = variable.removeprefix(PREFIX)
    section, _, key = rest.partition("_")
    tries = [f"{each}_{rest}" for each in _SECTIONS]
    if section in _SECTIONS:
        tries.append(f"{section}_{_WORDS.get(key, key)}")
    tries += [f"{each}_{_WORDS[rest]}" for each in _SECTIONS if rest in _WORDS]
    tries += [f"{rest}_LEVEL", f"{rest}_LISTEN"]
    return next((PREFIX + each for each in tries if PREFIX + each in names), None)


def warn(variable: str, suggestion: str | None) -> None:
    """Says once for each process that ``variable`` is not read."""
    if variable in _warned:
        return
    _warned.add(variable)
    remedy = f"did you mean {suggestion}?" if suggestion else "`moonpool config show` lists the settings"
    _log.warning("the variable %s is no setting of ours and is not read; %s", variable, remedy)
