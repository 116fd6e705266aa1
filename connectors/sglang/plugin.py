"""What the entry point ``sglang.srt.plugins`` calls in every process of SGLang. In a server that asks for
nothing of moonpool it changes nothing.

SGLang logs what a plugin raises and goes on without it. So what a server was asked to have and cannot have
ends its process by SystemExit, which SGLang does not catch.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points

GROUP = "sglang.srt.plugins"
NAME = "moonpool"
WHITELIST = "SGLANG_PLUGINS"


def register() -> None:
    from moonpool.connectors.sglang import short_name
    from moonpool.connectors.sglang.transfer import hook

    short_name.register()
    hook.register()


def left_out(environment: Mapping[str, str]) -> str:
    """One sentence when SGLang would start without this plugin, else "": ``moonpool sglang`` asks before it
    starts a server, since nothing of ours runs in one that left us out."""
    allowed = {name.strip() for name in environment.get(WHITELIST, "").split(",")} - {""}
    if allowed and NAME not in allowed:
        return (
            f"{WHITELIST}={environment[WHITELIST]} leaves the plugin {NAME} out, so SGLang would start "
            f"without it: add {NAME} to the list, or unset {WHITELIST}"
        )
    if not any(one.name == NAME for one in entry_points(group=GROUP)):
        return (
            f"the plugin {NAME} is not installed for this Python, so SGLang would start without it: run "
            f"`pip install moonpool` (a folder in PYTHONPATH is not enough)"
        )
    return ""
