"""How a configuration is put together from its sources; core/config/config.py says what is in it.

Every source gives raw values under "section.key"; the last source that names a key wins; then each value is
converted to the type of its field, and what does not fit is reported with the place it came from.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import inspect

from moonpool.core.config.arena_size import parse_arena_size
from moonpool.core.config.foreign_variables import is_foreign, meant, warn
from moonpool.core.config.setting import Section, Setting, extra_of, made_of, settings_of
from moonpool.core.config.units import format_size, parse_duration, parse_size
from moonpool.core.errors import ConfigError
from moonpool.core.printable import without_password

CONFIG_VARIABLE = "MOONPOOL_CONFIG"
PREFIX = "MOONPOOL_"
# Variables of ours that are not settings of the configuration.
OTHER_VARIABLES = (
    "MOONPOOL_CACHE",
    "MOONPOOL_CHILD",
    "MOONPOOL_CONFIG",
    "MOONPOOL_DEBUG",
    "MOONPOOL_RUNTIME_DIR",
)
# What Kubernetes puts into every container for a service that is called, for example, moonpool-node.
_SERVICE_LINK = re.compile(
    r"_SERVICE_HOST$|_SERVICE_PORT(_\w+)?$|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?$"
)
_SIZES = ("bytes", "arena bytes")
_FLAGS = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}


class Origin(msgspec.Struct, frozen=True):
    """Where a value came from. kind: default, file, environment or argument; detail: the file, variable or
    option. is_share: it was given as a share of the memory that was available then, as "80%".
    """

    kind: str
    detail: str = ""
    is_share: bool = False

    def __str__(self) -> str:
        return f"{self.kind} {self.detail}" if self.detail else self.kind


def load_sections(
    sections: Mapping[str, type[Section]],
    *,
    file: str | Path | None,
    env: Mapping[str, str],
    arguments: Mapping[str, object],
) -> tuple[dict[str, Any], dict[str, Origin]]:
    """Section name -> its struct, and "section.key" -> origin of each value that is not a default."""
    keys = {f"{name}.{each.name}": each for name, kind in sections.items() for each in settings_of(kind)}
    values: dict[str, object] = {}
    origins: dict[str, Origin] = {}
    for origin, found in (*_from_file(file, env, sections, keys), *_from_environment(env, sections, keys)):
        values |= found
        origins |= dict.fromkeys(found, origin)
    for key, value in arguments.items():
        values[key] = value
        origins[key] = Origin("argument", "--" + key.split(".", 1)[1].replace("_", "-"))
    made: dict[str, dict[str, object]] = {name: {} for name in sections}
    for key, raw in values.items():
        section, name = key.split(".", 1)
        made[section][name] = _convert(keys[key].type, raw, key, origins[key])
        if extra_of(keys[key].type).get("unit") == "arena bytes" and str(raw).strip().endswith("%"):
            origins[key] = msgspec.structs.replace(origins[key], is_share=True)
    return {name: made_of(kind, made[name]) for name, kind in sections.items()}, origins


def nearest(name: str, names: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The most similar of ``names``, or None when none is similar."""
    found = difflib.get_close_matches(name, list(names), n=1, cutoff=cutoff)
    return found[0] if found else None


def show_value(kind: inspect.Type, value: object) -> str:
    """A value as `config show` prints it, and as the TOML file takes it."""
    extra = extra_of(kind)
    if extra.get("secret"):
        return "(set)" if value else '""'
    if extra.get("userinfo"):
        value = without_password(str(value))
    if extra.get("unit") == "seconds":
        return f'"{value:g}s"'
    if extra.get("unit") in _SIZES and isinstance(value, int):
        return _exact_size(value)
    return json.dumps(msgspec.to_builtins(value), ensure_ascii=False)


def _exact_size(size: int) -> str:
    text = format_size(size).replace(" ", "").replace(".0", "")
    return f'"{text}"' if size and parse_size(text) == size else str(size)


Found = list[tuple[Origin, dict[str, object]]]


def _from_file(
    file: str | Path | None,
    env: Mapping[str, str],
    sections: Mapping[str, type[Section]],
    keys: Mapping[str, Setting],
) -> Found:
    path = str(file) if file else env.get(CONFIG_VARIABLE, "")
    if not path:
        return []
    try:
        with open(path, "rb") as stream:
            document = tomllib.load(stream)
    except OSError as error:
        raise _error(f"cannot read the config file {path}: {error.strerror}", path, error) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise _error(f"the config file {path} is no valid TOML: {error}", path, error) from error
    found: dict[str, object] = {}
    for section, table in document.items():
        if section not in sections:
            raise _unknown("section", section, f"the config file {path}", sections)
        if not isinstance(table, dict):
            raise _error(f"{section} in the config file {path} must be a table, written [{section}]", section)
        for name, value in table.items():
            key = f"{section}.{name}"
            if key not in keys:
                raise _unknown("key", key, f"the config file {path}", keys)
            if extra_of(keys[key].type).get("secret"):
                in_file = f"put it into a 0600 file and name that as {key}_file, or " * (
                    f"{key}_file" in keys
                )
                variable = f"{PREFIX}{key.replace('.', '_').upper()}"
                raise _error(f"{key} must not stand in the config file {path}; {in_file}set {variable}", key)
            found[key] = value
    return [(Origin("file", path), found)]


def _from_environment(
    env: Mapping[str, str], sections: Mapping[str, type[Section]], keys: Mapping[str, Setting]
) -> Found:
    variables = {PREFIX + key.replace(".", "_").upper(): key for key in keys}
    prefixes = tuple(f"{PREFIX}{section.upper()}_" for section in sections)
    found: Found = []
    for variable, text in env.items():
        if not variable.startswith(PREFIX) or variable in OTHER_VARIABLES:
            continue
        if variable in variables:
            found.append((Origin("environment", variable), {variables[variable]: text}))
        elif is_foreign(variable) or _is_of_kubernetes(variable, text):
            continue
        elif variable.startswith(prefixes):
            suggestion = meant(variable, variables)
            raise _unknown("variable", variable, "the environment", [suggestion] if suggestion else variables)
        elif (suggestion := meant(variable, variables)) is not None:
            warn(variable, suggestion)
        elif (near := nearest(variable, variables, cutoff=0.9)) is not None:
            raise _unknown("variable", variable, "the environment", [near])
        else:
            warn(variable, None)
    return found


def _is_of_kubernetes(variable: str, text: str) -> bool:
    return bool(_SERVICE_LINK.search(variable)) or (variable.endswith("_PORT") and "://" in text)


def _convert(kind: inspect.Type, raw: object, key: str, origin: Origin) -> object:
    """``raw`` as a value of the type ``kind``. Text stands for any type where the source can hold nothing
    else.
    """
    textual = origin.kind != "file" and isinstance(raw, str)
    unit = extra_of(kind).get("unit")
    bare = kind.type if isinstance(kind, inspect.Metadata) else kind
    if isinstance(bare, inspect.UnionType):  # of a list and something that is none
        is_list = isinstance(raw, list) or (textual and str(raw).strip().startswith("["))
        bare = next(member for member in bare.types if isinstance(member, inspect.ListType) is is_list)
        kind = bare
    try:
        if isinstance(bare, inspect.StructType):
            if isinstance(raw, bare.cls):  # made by the program itself
                return raw
            if isinstance(raw, dict):
                return _convert_struct(bare, raw, key, origin)
            raise ValueError("it must be a table")
        if isinstance(bare, inspect.ListType):
            items = _list_of_text(raw) if textual else raw
            if isinstance(items, list):
                return [
                    _convert(bare.item_type, item, f"{key}[{index}]", origin)
                    for index, item in enumerate(items)
                ]
            raise ValueError("it must be a list")
        if isinstance(bare, inspect.DictType):
            table = _table_of_text(raw) if textual else raw
            if isinstance(table, dict):
                return {
                    str(name): _convert(bare.value_type, value, f"{key}.{name}", origin)
                    for name, value in table.items()
                }
            raise ValueError("it must be a table")
        value = _scalar(bare, raw, unit, textual)
        allowed = extra_of(kind).get("choices")
        if allowed and value not in allowed:
            near = nearest(str(value), allowed)
            raise ValueError(
                f"it must be one of {', '.join(allowed)}" + (f"; did you mean {near}?" if near else "")
            )
        return msgspec.convert(value, _annotation(kind))
    except msgspec.ValidationError as error:
        message = str(error)
        raise _bad(key, raw, origin, message[:1].lower() + message[1:]) from error
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise _bad(key, raw, origin, str(error)) from error


def _convert_struct(kind: inspect.StructType, raw: dict[str, object], key: str, origin: Origin) -> object:
    fields = {field.name: field for field in kind.fields}
    for name in raw:
        if name not in fields:
            place = f"the config file {origin.detail}" if origin.kind == "file" else origin.detail
            raise _unknown("key", f"{key}.{name}", place, [f"{key}.{field}" for field in fields])
    return kind.cls(
        **{name: _convert(fields[name].type, value, f"{key}.{name}", origin) for name, value in raw.items()}
    )


def _scalar(kind: inspect.Type, raw: object, unit: object, textual: bool) -> object:
    if unit in _SIZES and isinstance(raw, str):
        return parse_size(raw) if unit == "bytes" else parse_arena_size(raw)
    if unit in _SIZES and (isinstance(raw, bool) or not isinstance(raw, int)):
        raise ValueError('it must be a size such as "1.5GiB", in quotes, or a whole number of bytes')
    if unit == "seconds" and isinstance(raw, str):
        return parse_duration(raw)
    if not textual or not isinstance(raw, str):
        return raw
    if isinstance(kind, inspect.BoolType):
        if raw.strip().lower() not in _FLAGS:
            raise ValueError("it must be true or false")
        return _FLAGS[raw.strip().lower()]
    if isinstance(kind, inspect.IntType):
        return int(raw)
    if isinstance(kind, inspect.FloatType):
        return float(raw)
    return raw


_IPV6 = re.compile(r"\[[0-9A-Fa-f.]*:")  # the beginning of "[::1]:7700"


def _list_of_text(text: object) -> object:
    """A list in a variable: JSON when it starts with a bracket that is not an IPv6 address's, else items
    between commas."""
    stripped = str(text).strip()
    if stripped.startswith("[") and not _IPV6.match(stripped):
        return json.loads(stripped)
    return [item.strip() for item in stripped.split(",") if item.strip()]


def _table_of_text(text: object) -> object:
    """A table in a variable: JSON when it starts with a brace, else name=value between commas."""
    stripped = str(text).strip()
    if stripped.startswith("{"):
        return json.loads(stripped)
    pairs = [item.partition("=") for item in stripped.split(",") if item.strip()]
    if any(not mark for _, mark, _ in pairs):
        raise ValueError("it must be written name=value,name=value")
    return {name.strip(): value.strip() for name, _, value in pairs}


def _annotation(kind: inspect.Type) -> Any:
    """The annotation that msgspec.convert checks a scalar against, made again from its description."""
    bare = kind.type if isinstance(kind, inspect.Metadata) else kind
    if isinstance(bare, inspect.BoolType):
        return bool
    if isinstance(bare, inspect.StrType):
        return str
    if isinstance(bare, inspect.IntType | inspect.FloatType):
        base = int if isinstance(bare, inspect.IntType) else float
        bounds = {name: getattr(bare, name) for name in ("gt", "ge", "lt", "le")}
        given = {name: bound for name, bound in bounds.items() if bound is not None}
        return Annotated[base, msgspec.Meta(**given)] if given else base
    raise TypeError(f"no scalar: {bare}")


def _unknown(what: str, name: str, place: str, names: Iterable[str]) -> ConfigError:
    names = list(names)
    near = names[0] if len(names) == 1 else nearest(name, names)
    remedy = f"; did you mean {near}?" if near else "; `moonpool config show` lists all"
    return _error(f"unknown {what} {name} in {place}{remedy}", name)


def _bad(key: str, raw: object, origin: Origin, reason: str) -> ConfigError:
    return _error(f"{key} = {raw!r} ({origin}) is wrong: {reason}", key)


def _error(message: str, key: str, cause: BaseException | None = None) -> ConfigError:
    return ConfigError(message, operation="config", key=key, cause=cause)


def default_file(env: Mapping[str, str] | None = None) -> str:
    """The config file that MOONPOOL_CONFIG names, or ""."""
    return (os.environ if env is None else env).get(CONFIG_VARIABLE, "")
