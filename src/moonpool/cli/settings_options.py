"""The options of a command that stand for settings of the configuration: made of the settings themselves.

An option has the name, type, bounds, default and help of its setting. It is made when its command runs or
shows its help: `moonpool --help` loads no settings.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

# "section.key" -> how the help writes a value ("": by its type), and behind it the option's name where that
# is not the key's: "URL --engine".
Options = Mapping[str, str]


def command_of(options: Options | Mapping[str, Options]) -> type[typer.core.TyperCommand]:
    """A class of commands that have these options, in front of those of their function; given(ctx) returns
    what the user gave. options: of one group, or group -> its options.
    """
    groups: Mapping[Any, Any] = options if _are_groups(options) else {None: options}

    class Command(typer.core.TyperCommand):
        _made: tuple[Any, ...] = ()

        def get_params(self, ctx: Any) -> Any:
            if not self._made:
                self._made = tuple(_make(groups))
                self.params[:0] = self._made
            return super().get_params(ctx)

        def invoke(self, ctx: Any) -> Any:
            taken = {option.name.replace("__", ".", 1): ctx.params.pop(option.name) for option in self._made}
            ctx.obj = {key: value for key, value in taken.items() if _is_given(value)}
            return super().invoke(ctx)

    return Command


def given(ctx: typer.Context, token_file: Path | None = None) -> dict[str, object]:
    """ "section.key" -> value, of the settings that the command line names."""
    token = {} if token_file is None else {"cluster.token_file": str(token_file)}
    return {**ctx.obj, **token}


def _is_given(value: object) -> bool:
    """Whether it is another value than that of an option which is not given; 0 is one."""
    return value is not None and value is not False and value not in ([], ())


def _are_groups(options: Mapping[str, Any]) -> bool:
    return not all(isinstance(form, str) for form in options.values())


def _make(groups: Mapping[str | None, Options]) -> list[Any]:
    """Typer's own objects for the options: those of a function that has these parameters."""
    names = {key: _name(key, form) for options in groups.values() for key, form in options.items()}
    parameters = [
        inspect.Parameter(
            key.replace(".", "__"),
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=_annotation(key, form.partition(" ")[0], group, names),
        )
        for group, options in groups.items()
        for key, form in options.items()
    ]

    def function() -> None:
        pass

    function.__annotations__ = {each.name: each.annotation for each in parameters}
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    app = typer.Typer(add_completion=False)
    app.command()(function)
    return list(typer.main.get_command(app).params)


def _name(key: str, form: str) -> str:
    return form.partition(" ")[2] or "--" + key.split(".", 1)[1].replace("_", "-")


def _annotation(key: str, shown: str, group: str | None, names: Mapping[str, str]) -> Any:
    """The annotation of a parameter of a command's function that stands for the setting ``key``."""
    from msgspec.inspect import BoolType, FloatType, IntType, ListType

    from moonpool.core.config.config_sources import show_value
    from moonpool.core.config.sections import SECTIONS
    from moonpool.core.config.setting import settings_of

    section, name = key.split(".", 1)
    setting = next(each for each in settings_of(SECTIONS[section]) if each.name == name)
    bare, default = setting.bare, setting.default
    option: dict[str, Any] = {
        "metavar": shown or None,
        "help": _sentence(setting.help, names),
        "rich_help_panel": group,
        "show_default": show_value(setting.type, default).strip('"') if default else False,
    }
    kind: Any = str
    if isinstance(bare, ListType):
        kind = list[str]
        option["help"] += " Repeatable."
    elif isinstance(bare, BoolType):
        kind = bool
    elif "bytes" not in setting.unit and isinstance(bare, IntType | FloatType):
        kind = int if isinstance(bare, IntType) else float
        option |= {"min": bare.ge, "max": bare.le}
    return Annotated[kind | None, typer.Option(names[key], **option)]


def _sentence(help: str, names: Mapping[str, str]) -> str:
    """The help of a setting as that of an option: other settings by the names of their options."""
    text = re.sub(r"\b[a-z]+\.[a-z_]+\b", lambda found: names.get(found[0], found[0]), help)
    first = text.split(maxsplit=1)[0]
    return (text if ":" in first else text[:1].upper() + text[1:]) + "."
