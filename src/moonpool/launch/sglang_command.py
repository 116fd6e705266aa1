"""The command line of an SGLang server with the pool: pure text, no engine is imported."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from moonpool.connectors.sglang.extra_config import EXTRA_CONFIG, completed
from moonpool.core.config.config_sources import nearest
from moonpool.core.errors import ConfigError

STORAGE_BACKEND = "--hicache-storage-backend"
PD_VARIABLE = "MOONPOOL_SGLANG_PD"
PD_MODES = ("prefill", "decode")
OLDEST = (0, 5, 18)
OPTIONS = ("--kv-pool", "--pd", "--node", "--require-pool", "--dry-run", "--python")
PAGE_TOKENS = 64
_OFFLOAD = "--disaggregation-decode-enable-offload-kvcache"
_KERNEL_LAYOUTS = ("page_first", "page_head")  # SGLang copies these to a GPU by a kernel only

LOOK_S = 30.0
_LOOK = """
import importlib.metadata as metadata, importlib.util as util, json, os
def version():
    try: return metadata.version("sglang")
    except metadata.PackageNotFoundError: return "" if util.find_spec("sglang") else None
allowed = os.environ.get("SGLANG_PLUGINS", "")
names = {each.name for each in metadata.entry_points(group="sglang.srt.plugins")}
print(json.dumps({
    "sglang": version(),
    "moonpool": util.find_spec("moonpool") is not None,
    "plugin": "moonpool" in names and (not allowed or "moonpool" in map(str.strip, allowed.split(","))),
}))
"""


@dataclass(frozen=True)
class Server:
    """A server that is wanted. kv_pool: with the pool as HiCache's third tier; pd: its half of a hand-over,
    or ""; node: a socket or the name of a node, or "" for the host's default one; flags: SGLang's own, which
    go before ours wherever both say something."""

    model: str
    kv_pool: bool = False
    pd: str = ""
    node: str = ""
    require_pool: bool = False
    flags: tuple[str, ...] = ()

    def arguments(self) -> list[str]:
        """What `python -m sglang.launch_server` is called with. Raises ConfigError for flags that exclude
        each other, and for a misspelt option of ours among them."""
        for flag in self.flags:
            name = flag.partition("=")[0]
            if (near := nearest(name, OPTIONS, cutoff=0.88)) is not None:
                raise _wrong(flag, f"is no option; did you mean {near}?")
            # SGLang takes any beginning of a flag's name, and ours, which stands last, would go before it.
            shortened = len(STORAGE_BACKEND) < len(name) < len(EXTRA_CONFIG) and EXTRA_CONFIG.startswith(name)
            if self.kv_pool and shortened:
                raise _wrong(name, f"must be written out: {EXTRA_CONFIG}")
        made = ["--model-path", self.model]
        if self.kv_pool or self.pd:  # the two of a pair must have one page size
            made += self._unless_given("--page-size", str(PAGE_TOKENS))
        if self.kv_pool:
            made += self._pool()
        elif self.node or self.require_pool:
            raise _wrong("--node" if self.node else "--require-pool", "needs --kv-pool")
        if self.pd:
            made += self._pd()
        # SGLang takes what stands last: the user's flags, but our extra config, which has theirs in it.
        return [*made, *self.flags, *(self._extra_config() if self.kv_pool else ())]

    def environment(self) -> dict[str, str]:
        """What the server finds in its environment, beside what is there."""
        return {PD_VARIABLE: "1"} if self.pd else {}

    def _pool(self) -> list[str]:
        if STORAGE_BACKEND in self._given():
            raise _wrong("--kv-pool", f"and {STORAGE_BACKEND} exclude each other; give one of them")
        # Without a radix cache, a decode server has no tiers; what it computes goes to the pool all the same.
        plain_decode = (
            self.pd == "decode" and "--disaggregation-decode-enable-radix-cache" not in self._given()
        )
        made = [_OFFLOAD if plain_decode else "--enable-hierarchical-cache"]
        # direct: SGLang's copies with and without a GPU; with it a layer of a page lies in one piece.
        layout, io = self._value("--hicache-mem-layout"), self._value("--hicache-io-backend")
        if layout is None:
            layout = "page_first_direct" if io in (None, "direct") else "page_first"
            made += ["--hicache-mem-layout", layout]
        if io is None:
            made += ["--hicache-io-backend", "kernel" if layout in _KERNEL_LAYOUTS else "direct"]
        return [*made, STORAGE_BACKEND, "dynamic"]

    def _extra_config(self) -> list[str]:
        try:
            extra = json.loads(self._value(EXTRA_CONFIG) or "{}")
        except ValueError as error:
            raise _wrong(EXTRA_CONFIG, f"must be a JSON object beside --kv-pool ({error})") from None
        if not isinstance(extra, dict):
            raise _wrong(EXTRA_CONFIG, "must be a JSON object beside --kv-pool")
        if self.node:
            extra["node"] = self.node
        if self.require_pool:
            extra["require_pool"] = True
        return [EXTRA_CONFIG, json.dumps(completed(extra), separators=(",", ":"))]

    def _pd(self) -> list[str]:
        if self.pd not in PD_MODES:
            raise _wrong("--pd", f"must be one of {', '.join(PD_MODES)}, not {self.pd!r}")
        mode = self._value("--disaggregation-mode")
        if mode not in (None, self.pd):
            raise _wrong("--pd", f"is {self.pd}, and --disaggregation-mode {mode}; give one of them")
        backend = self._value("--disaggregation-transfer-backend")
        if backend not in (None, "mooncake"):
            raise _wrong("--pd", f"and --disaggregation-transfer-backend {backend} exclude each other")
        return [
            *self._unless_given("--disaggregation-mode", self.pd),
            *self._unless_given("--disaggregation-transfer-backend", "mooncake"),
        ]

    def _unless_given(self, flag: str, value: str) -> list[str]:
        return [] if flag in self._given() else [flag, value]

    def _given(self) -> dict[str, str | None]:
        """SGLang's flags by name, with their values."""
        found: dict[str, str | None] = {}
        for place, flag in enumerate(self.flags):
            name, mark, value = flag.partition("=")
            if name.startswith("--"):
                behind = self.flags[place + 1] if place + 1 < len(self.flags) else None
                found[name.replace("_", "-")] = value if mark else behind
        return found

    def _value(self, flag: str) -> str | None:
        return self._given().get(flag)


@dataclass(frozen=True)
class Found:
    """What a Python has. sglang: the version, "" when it does not say, None without it; moonpool: whether it
    has this package; plugin: whether SGLang would load our plugin there."""

    sglang: str | None
    moonpool: bool = True
    plugin: bool = True

    def check(self, *, python: str, pd: bool) -> None:
        """Raises ConfigError when a server of this Python would not be the one that was asked for."""
        if self.sglang is None:
            raise _missing(
                f"there is no SGLang in {python}; install it there, or name the Python that has it (--python)"
            )
        match = re.match(r"(\d+)\.(\d+)\.(\d+)", self.sglang)
        if match is not None and tuple(map(int, match.groups())) < OLDEST:
            oldest = ".".join(map(str, OLDEST))
            raise _missing(f"SGLang {self.sglang} is too old for moonpool, which needs {oldest} or newer")
        if not self.moonpool:
            raise _missing(f"there is no moonpool in {python}, beside SGLang; install it there")
        if pd and not self.plugin:
            raise _missing(
                f"SGLang would not load moonpool's plugin in {python}, so its own transfer engine would run: "
                f"install moonpool there with pip, and name it in SGLANG_PLUGINS where that is set"
            )


def look(python: str) -> Found:
    """What the program ``python`` has. Raises ConfigError when it does not say."""
    try:
        run = subprocess.run([python, "-c", _LOOK], stdout=subprocess.PIPE, timeout=LOOK_S, check=True)
        return Found(**json.loads(run.stdout))
    except (OSError, subprocess.SubprocessError, ValueError, TypeError) as error:
        raise _missing(f"{python} does not run as a Python ({error})") from error


def find_python(program: str = "") -> str:
    """The path of ``program``, or this Python. Raises ConfigError."""
    found = shutil.which(program) if program else sys.executable
    if not found:
        raise _missing(f"there is no program {program}")
    return found


def launch(python: str, arguments: Sequence[str]) -> list[str]:
    """The whole command."""
    return [python, "-m", "sglang.launch_server", *arguments]


def _wrong(option: str, reason: str) -> ConfigError:
    return ConfigError(f"{option} {reason}", operation="sglang", key=option)


def _missing(sentence: str) -> ConfigError:
    return ConfigError(sentence, operation="sglang", key="python")
