"""``--hicache-storage-backend moonpool``: the short name, where SGLang has plugins (0.5.14 and newer).

SGLang knows only its own backends by name: in the parser, in its factory, and where it chooses between one
copy and two. So the name is translated once, at the entry, into the backend ``dynamic`` with our class in the
extra config. No later code sees the short name.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from moonpool.connectors.sglang.extra_config import EXTRA_CONFIG, completed
from moonpool.core.errors import ConfigError

NAME = "moonpool"
_SCHEDULER = "sglang.srt.managers.scheduler"


def register() -> None:
    """Called in every process of SGLang that loads plugins. When it fails, it logs a warning and the parser
    refuses the name; a server that does not use the name is left as it is. Never raises."""
    import logging

    log = logging.getLogger("sglang.moonpool.plugin")
    try:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType
        from sglang.srt.server_args import ServerArgs

        arguments = f"{ServerArgs.__module__}.{ServerArgs.__qualname__}"
        hooks: list[tuple[str, Callable[..., None], Any]] = [
            (f"{arguments}.add_cli_args", _add_choice, HookType.AFTER),
            (f"{arguments}.{_first_look(ServerArgs)}", _translate_arguments, HookType.BEFORE),
        ]
        if not hasattr(ServerArgs, "add_cli_args"):
            raise AttributeError("ServerArgs has no add_cli_args")
        scheduler = getattr(sys.modules.get(_SCHEDULER), "Scheduler", None)
        if hasattr(scheduler, "attach_hicache_storage_wrapped"):  # elsewhere no backend attaches at runtime
            target = f"{_SCHEDULER}.Scheduler.attach_hicache_storage_wrapped"
            hooks.append((target, _translate_request, HookType.BEFORE))
        for target, hook, kind in hooks:
            HookRegistry.register(target, hook, kind)
    except Exception as error:  # the engine must start, also with a future SGLang
        log.warning(
            "moonpool: this SGLang does not take the short name %s (%s: %s); use the backend dynamic, see "
            "docs/sglang.md",
            NAME,
            type(error).__name__,
            error,
        )


def _first_look(arguments: type) -> str:
    """The method of ServerArgs in which SGLang first looks at what it was given, and before which it may
    still be changed. A msgspec.Struct (0.5.23) calls the __post_init__ that it was made with, whatever it is
    replaced by."""
    if hasattr(arguments, "resolve_once"):
        return "resolve_once"
    if dataclasses.is_dataclass(arguments):
        return "__post_init__"
    raise AttributeError("ServerArgs has no resolve_once")


def translate(backend: str | None, extra: str | None) -> tuple[str | None, str | None]:
    """The backend and its extra config (a JSON text, or "@" and a file) as SGLang understands them.

    Raises ConfigError for an extra config that cannot be read.
    """
    if backend != NAME:
        return backend, extra
    return "dynamic", json.dumps(completed(_read(extra)), separators=(",", ":"))


def _add_choice(result: object, parser: Any, *args: object, **kwargs: object) -> None:
    for action in parser._actions:
        if action.dest == "hicache_storage_backend" and action.choices and NAME not in action.choices:
            action.choices = [*action.choices, NAME]


def _translate_arguments(arguments: Any, *args: object, **kwargs: object) -> None:
    """Translates a ServerArgs before its resolution. A ConfigError ends the start with its sentence."""
    if getattr(arguments, "hicache_storage_backend", None) == NAME:
        translated = translate(NAME, arguments.hicache_storage_backend_extra_config)
        arguments.hicache_storage_backend, arguments.hicache_storage_backend_extra_config = translated


def _translate_request(scheduler: object, request: Any, *args: object, **kwargs: object) -> None:
    """Translates a request that attaches a backend at run time. SGLang answers what cannot be translated with
    its own error: an exception here would end its scheduler."""
    try:
        backend, extra = translate(
            request.hicache_storage_backend, request.hicache_storage_backend_extra_config_json
        )
    except ConfigError:
        return
    request.hicache_storage_backend, request.hicache_storage_backend_extra_config_json = backend, extra


def _read(extra: str | None) -> Mapping[str, object]:
    try:
        value = _load(extra) if extra else {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{EXTRA_CONFIG}: {error}", operation="config", key="extra_config") from error
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{EXTRA_CONFIG} must be a JSON object, not {extra!r:.80}", operation="config", key="extra_config"
        )
    return value


def _load(extra: str) -> object:
    """SGLang's two forms, and its three kinds of file."""
    if not extra.startswith("@"):
        return json.loads(extra)
    path = Path(extra[1:])
    text = path.read_text()
    if path.suffix == ".toml":
        return tomllib.loads(text)
    if path.suffix in (".yaml", ".yml"):
        return importlib.import_module("yaml").safe_load(text)  # SGLang's own dependency
    return json.loads(text)
