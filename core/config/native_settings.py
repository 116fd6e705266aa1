"""Settings for the servers in C++: a value for each setting that a server names, and no other.

C++ has no defaults of its own for them; an embedded node gets those of the configuration, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moonpool.core.config.sections import Master, Node
from moonpool.core.config.setting import Section, settings_of

if TYPE_CHECKING:
    from moonpool import _native


def native_settings(
    server: type[_native.Server | _native.MasterServer], section: Section
) -> dict[str, object]:
    """What ``server`` is made with, as ``section`` has it."""
    values = {each.name: each.value_in(section) for each in settings_of(type(section))}
    return {name: values[name] for name in server.setting_names()}


def node_settings(node: Node | None = None, **changes: object) -> dict[str, object]:
    """For _native.Server: those of ``node``, or the defaults with these changes."""
    from moonpool import _native

    return native_settings(_native.Server, node or Node(**changes))  # type: ignore[arg-type]


def master_settings(master: Master | None = None, **changes: object) -> dict[str, object]:
    """For _native.MasterServer: those of ``master``, or the defaults with these changes."""
    from moonpool import _native

    return native_settings(_native.MasterServer, master or Master(**changes))  # type: ignore[arg-type]
