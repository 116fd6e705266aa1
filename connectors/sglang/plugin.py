"""What the entry point ``sglang.srt.plugins`` calls in every process of SGLang. In a server that asks for
nothing of moonpool nothing acts otherwise: the short name's hooks look for that name only, and of replaced
weights it is only remembered that there were some.

SGLang logs what a plugin raises and goes on without it. So what a server was asked to have and cannot have
ends its process by SystemExit, which SGLang does not catch. Where SGLang leaves the plugin out
(SGLANG_PLUGINS without "moonpool") nothing of ours runs; hence `moonpool sglang --pd` looks before it starts
a server.
"""

from __future__ import annotations

import os

ASKING = ("MOONPOOL_SGLANG_PD", "MOONPOOL_SGLANG_EMBEDDINGS")


def register() -> None:
    """Called by SGLang's entry point. Raises what goes wrong, which SGLang logs; exits when the environment
    asks for moonpool."""
    try:
        from moonpool.connectors.sglang import short_name, updates
        from moonpool.connectors.sglang.transfer import hook

        short_name.register()
        updates.watch_loaded()
        hook.register()
    except Exception as error:
        asked = [name for name in ASKING if os.environ.get(name)]
        if not asked:
            raise
        raise SystemExit(f"moonpool: {asked[0]} is set, but {type(error).__name__}: {error}") from error
