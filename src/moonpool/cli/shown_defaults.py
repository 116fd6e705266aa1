"""The help of a command whose options stand for settings: it shows each setting's default."""

from __future__ import annotations

from typing import Any

import typer.core


def command_of(section: str) -> type[typer.core.TyperCommand]:
    """A class of commands whose options, where they are not given, come from ``section`` of the configuration
    or from [cluster]. An option has the name of its setting; defaults are looked up when help is asked for.
    """

    class Command(typer.core.TyperCommand):
        def format_help(self, ctx: Any, formatter: Any) -> None:
            shown = _defaults("cluster") | _defaults(section)
            for option in self.params:
                if isinstance(option, typer.core.TyperOption) and option.name in shown:
                    option.show_default = shown[option.name]
            super().format_help(ctx, formatter)

    return Command


def _defaults(section: str) -> dict[str, str]:
    """name -> value, of the settings whose default says something: not an empty one."""
    import msgspec

    from moonpool.core.config.config_sources import show_value
    from moonpool.core.config.sections import SECTIONS

    kind = SECTIONS[section]
    values = kind()
    return {
        field.name: show_value(field.type, value).strip('"')
        for field in msgspec.structs.fields(kind)
        if (value := getattr(values, field.name)) not in ("", 0, [], {})
    }
