"""The JSON schema of a configuration file, and the tables of docs/configuration.md, made of the settings."""

from __future__ import annotations

from typing import Any

import msgspec

from moonpool.core.config.config_sources import show_value
from moonpool.core.config.sections import SECRETS, SECTIONS, TABLES
from moonpool.core.config.setting import Section, parts_of, settings_of


def json_schema() -> dict[str, Any]:
    """The JSON schema of the TOML file, with the help of each key."""
    properties: dict[str, Any] = {}
    (_, *_), components = msgspec.json.schema_components(
        list(SECTIONS.values()), ref_template="#/$defs/{name}"
    )
    for name, kind in SECTIONS.items():
        properties[name] = schema = components.pop(kind.__name__) | {"default": {}}
        for field, part in parts_of(kind).items():
            del schema["properties"][field]
            inner = components.pop(part.__name__)["properties"]
            schema["properties"] |= {part.prefix + key: value for key, value in inner.items()}
    for schema in (*properties.values(), *components.values()):
        _describe(schema)
    for secret in SECRETS:
        del properties["cluster"]["properties"][secret.removeprefix("cluster.")]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "moonpool.toml",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "$defs": components,
    }


def _describe(schema: dict[str, Any]) -> None:
    """Leaves out what is for readers of the code, and lets a number with a unit be text, such as "2GiB"."""
    schema.pop("description", None)
    for value in schema["properties"].values():
        for leaf in (value, value.get("additionalProperties")):
            if isinstance(leaf, dict) and "x-unit" in leaf:
                leaf["type"] = [leaf["type"], "string"]


def markdown() -> str:
    """The tables of docs/configuration.md."""
    lines: list[str] = []
    for name, kind in SECTIONS.items():
        lines += _table(f"[{name}]", kind)
        for key, table in TABLES.items():
            if key.startswith(f"{name}."):
                lines += _table(f"[[{key}]]", table)
    return "\n".join(lines)


def _table(title: str, kind: type[Section]) -> list[str]:
    rows = [
        f"| `{each.name}` | `{show_value(each.type, each.default)}` | {each.help} |"
        for each in settings_of(kind)
    ]
    return ["", f"## `{title}`", "", "| key | default | meaning |", "|---|---|---|", *rows]
