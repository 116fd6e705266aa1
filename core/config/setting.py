"""What a setting is: a field of a struct, whose annotation has its type, bounds, unit and help."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, NamedTuple

import msgspec
from msgspec import inspect


def about(
    help: str,
    *,
    choices: tuple[str, ...] = (),
    ge: float | None = None,
    le: float | None = None,
) -> msgspec.Meta:
    """Of one setting: its help, which goes on behind "KEY: "; the values that it may have; its bounds."""
    return msgspec.Meta(
        description=help,
        ge=ge,
        le=le,
        extra={"choices": choices} if choices else None,
        extra_json_schema={"enum": list(choices)} if choices else None,
    )


Size = Annotated[int, msgspec.Meta(ge=0, extra={"unit": "bytes"}, extra_json_schema={"x-unit": "bytes"})]
PositiveSize = Annotated[
    int, msgspec.Meta(ge=1, extra={"unit": "bytes"}, extra_json_schema={"x-unit": "bytes"})
]
# Of an arena: also a share of the available memory, as "80%".
ArenaSize = Annotated[
    int, msgspec.Meta(ge=0, extra={"unit": "arena bytes"}, extra_json_schema={"x-unit": "bytes"})
]
Duration = Annotated[
    float, msgspec.Meta(ge=0, extra={"unit": "seconds"}, extra_json_schema={"x-unit": "seconds"})
]
PositiveDuration = Annotated[
    float, msgspec.Meta(ge=0.001, extra={"unit": "seconds"}, extra_json_schema={"x-unit": "seconds"})
]
Count = Annotated[int, msgspec.Meta(ge=1)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
Secret = Annotated[str, msgspec.Meta(extra={"secret": "yes"})]
# It may name a user and a password before an @; they are not shown.
StoreUrl = Annotated[str, msgspec.Meta(extra={"userinfo": "hidden"})]


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """A table of the configuration. A field is a setting, or a part."""


class Part(Section, frozen=True, kw_only=True):
    """Settings of a section that are used together. Their keys stand in the section, behind ``prefix``."""

    prefix: ClassVar[str] = ""


class Setting(NamedTuple):
    """What the definition of one setting says.

    type:  with bounds, unit and help around the bare type.
    place: names of the fields from the section to it; of more than one where it is in a part.
    """

    name: str
    type: inspect.Type
    default: object
    place: tuple[str, ...]

    @property
    def bare(self) -> inspect.Type:
        """Without what stands around it: IntType has the bounds, ListType the type of the items."""
        return self.type.type if isinstance(self.type, inspect.Metadata) else self.type

    @property
    def help(self) -> str:
        """The text that ``about`` was given. Raises KeyError for a field without ``about``."""
        described = self.type.extra_json_schema if isinstance(self.type, inspect.Metadata) else None
        return str((described or {})["description"])

    @property
    def unit(self) -> str:
        """seconds, bytes, arena bytes, or "" for none."""
        return str(extra_of(self.type).get("unit", ""))

    def value_in(self, section: Section) -> object:
        """Its value in ``section``, which is of the type that the setting was taken from."""
        value: object = section
        for name in self.place:
            value = getattr(value, name)
        return value


def settings_of(kind: type[Section]) -> tuple[Setting, ...]:
    """All of a section, in the order of the documentation: its own, those of its base, those of its parts."""
    made, parts = kind(), parts_of(kind)
    own = [
        Setting(field.name, field.type, getattr(made, field.name), (field.name,))
        for field in sorted(_fields(kind), key=lambda field: field.name not in kind.__annotations__)
        if field.name not in parts
    ]
    for name, part in parts.items():
        for each in settings_of(part):
            own.append(each._replace(name=part.prefix + each.name, place=(name, *each.place)))
    return tuple(own)


def parts_of(kind: type[Section]) -> dict[str, type[Part]]:
    """Field -> type, of the parts of a section."""
    return {
        field.name: field.type.cls
        for field in _fields(kind)
        if isinstance(field.type, inspect.StructType) and issubclass(field.type.cls, Part)
    }


def made_of(kind: type[Section], values: Mapping[str, object]) -> Section:
    """A section of these values by their keys; all others have their defaults."""
    fields: dict[str, object] = {}
    parts: dict[str, dict[str, object]] = {}
    for each in settings_of(kind):
        if each.name in values:
            *part, name = each.place
            (parts.setdefault(part[0], {}) if part else fields)[name] = values[each.name]
    kinds = parts_of(kind)
    return kind(**fields, **{name: kinds[name](**given) for name, given in parts.items()})


def extra_of(kind: inspect.Type) -> dict[str, Any]:
    """What about() and the types above say of a type besides bounds: unit, choices, secret."""
    return (kind.extra or {}) if isinstance(kind, inspect.Metadata) else {}


@functools.cache  # msgspec takes a millisecond for it, and a command asks some four hundred times
def _fields(kind: type[Section]) -> tuple[inspect.Field, ...]:
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    return info.fields
