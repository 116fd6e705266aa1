"""Puts ``MoonpoolTransferEngine`` where SGLang has its own class, by SGLang's hooks: everything that SGLang
does with its ``mooncake`` transfer backend, PD and EPD, then runs over moonpool's engine.

A server with MOONPOOL_SGLANG_PD=1 either does that or ends, with one sentence:

- before SGLang starts anything: the class is not where it was, has other methods, or methods with other
  parameters than those of the versions that this was written for;
- when the arguments are read, and when a scheduler starts: they ask for another transfer backend, for memory
  of a device that is no CUDA card, or for processes in which SGLang loads no plugins;
- when a scheduler starts: some module still has SGLang's class;
- whenever SGLang's own class is made after all.

register() runs inside of SGLang's load_plugins(), which applies the hooks only afterwards; hence the later
checks.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
import threading
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any, NoReturn

from moonpool.connectors.sglang.transfer import settings
from moonpool.core.errors import ConfigError

MODULE = "sglang.srt.distributed.device_communicators.mooncake_transfer_engine"
CLASS = "MooncakeTransferEngine"
INIT = "maybe_init_shared_mooncake_transfer_engine"
ARGUMENTS = "sglang.srt.server_args.prepare_server_args"
BACKENDS = ("mooncake", "mooncake_tcp")
# What SGLang 0.5.18 to 0.5.23 has, and calls from outside of the class but for initialize().
METHODS: dict[str, tuple[str, ...]] = {
    "__init__": ("hostname", "gpu_id", "ib_device"),
    "initialize": ("hostname", "device_name"),
    "register": ("ptr", "length"),
    "deregister": ("ptr",),
    "batch_register": ("ptrs", "lengths"),
    "batch_deregister": ("ptrs",),
    "transfer_sync": ("session_id", "buffer", "peer_buffer_address", "length"),
    "batch_transfer_sync": ("session_id", "buffers", "peer_buffer_addresses", "lengths"),
    "get_session_id": (),
    "send_probe": ("peer_session_id",),
    "get_engine": (),
    "get_ib_device": (),
}
_log = logging.getLogger("sglang.moonpool.transfer")


def register() -> None:
    """Called by SGLang in every process; does nothing unless the environment asks for it."""
    try:
        handing, caching = (settings.is_on(name, os.environ) for name in (settings.PD, settings.EMBEDDINGS))
        if caching:
            from moonpool.connectors.sglang.transfer import embeddings  # which imports SGLang

            embeddings.register()
        if handing:
            settings.Settings.read(os.environ)
            _put_in_place()
        if handing or caching:
            _hook(ARGUMENTS, _check_result)
    except ConfigError as error:
        stop(str(error))


def stop(why: str) -> NoReturn:
    """Ends this process, and with it the server, with that sentence."""
    sentence = f"moonpool: {why}"
    if threading.current_thread() is threading.main_thread():
        raise SystemExit(sentence)  # an exception that SGLang does not catch; Python prints it
    print(sentence, file=sys.stderr, flush=True)
    os._exit(1)


def mismatch(module: ModuleType) -> str:
    """What differs there from what this was written for, as the end of a sentence; "" when nothing does."""
    found = getattr(module, CLASS, None)
    if not isinstance(found, type):
        return f"{module.__name__} has no class {CLASS}"
    if not callable(getattr(module, INIT, None)):
        return f"{module.__name__} has no {INIT}"
    public = {name for name, value in vars(found).items() if callable(value) and not name.startswith("_")}
    if unknown := sorted(public - METHODS.keys()):
        return f"{CLASS} has methods that are new: {', '.join(unknown)}"
    for name, expected in METHODS.items():
        method = found.__dict__.get(name)
        if not callable(method):
            return f"{CLASS} has no method {name}"
        parameters = tuple(inspect.signature(method).parameters)[1:]
        if parameters != expected:
            return f"{CLASS}.{name} takes ({', '.join(parameters)}) and not ({', '.join(expected)})"
    return ""


def _put_in_place() -> None:
    from moonpool.connectors.sglang.transfer.engine import MoonpoolTransferEngine

    try:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        module = import_module(MODULE)
    except ImportError as error:
        stop(f"{settings.PD}=1, but this SGLang has no place for it ({error}): use SGLang 0.5.18 to 0.5.23")
    original: Any = getattr(module, CLASS, None)
    if original is MoonpoolTransferEngine:
        return  # called before
    if why := mismatch(module):
        stop(
            f"{settings.PD}=1, but this SGLang is not one that moonpool knows: {why}. Use SGLang 0.5.18 to "
            f"0.5.23, or a newer moonpool"
        )
    HookRegistry.register(f"{MODULE}.{CLASS}", MoonpoolTransferEngine, HookType.REPLACE)
    _hook(f"{MODULE}.{INIT}", _Start(module, original, MoonpoolTransferEngine))
    original.__init__ = _refuse


def _hook(target: str, hook: Callable[..., Any]) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(target, hook, HookType.AROUND)


def _refuse(self: object, *args: object, **kwargs: object) -> None:
    """Replaces the __init__ of SGLang's class."""
    stop(
        f"SGLang makes its own {CLASS}, though {settings.PD}=1: the hook was not applied. Look for "
        f"'Failed to apply hooks' in the log, and for other plugins that replace it"
    )


class _Start:
    """Around what each scheduler calls to have its engine."""

    def __init__(self, module: ModuleType, original: type, ours: type) -> None:
        self._module = module
        self._original = original
        self._ours = ours

    def __call__(self, init: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        self._check_place()
        from moonpool.connectors.sglang import compat

        check_arguments(kwargs.get("server_args") or compat.server_args())
        try:
            init(*args, **kwargs)
        except ConfigError as error:  # no token, no such address: of our engine
            stop(str(error))

    def _check_place(self) -> None:
        if getattr(self._module, CLASS) is not self._ours:
            stop(f"{settings.PD}=1, but {MODULE}.{CLASS} is {getattr(self._module, CLASS)!r}")
        for name, module in list(sys.modules.items()):
            if isinstance(module, ModuleType) and vars(module).get(CLASS) is self._original:
                stop(f"{settings.PD}=1, but the module {name} still has SGLang's own {CLASS}")


def _check_result(prepare: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around what reads the arguments in a server's first process."""
    result = prepare(*args, **kwargs)
    check_arguments(result)
    return result


def check_arguments(args: Any) -> None:
    """Ends the process when a server with these arguments (SGLang's ServerArgs) would not do what it was
    asked to."""
    if why := unfit(args, os.environ):
        stop(why)


def unfit(args: Any, environment: Any) -> str:
    """Why not, in one sentence; "" when they fit."""
    handing = settings.is_on(settings.PD, environment)
    if args.encoder_only and (workers := _workers_without_plugins(args, environment)):
        return (
            f"SGLang loads no plugins in the {workers} of an encoder, so these would do without moonpool: "
            f"start one encoder for each GPU, with --dp-size 1 --tp-size 1"
        )
    if not handing:
        return ""
    if args.elastic_ep_backend == "mooncake" or (
        args.enable_elastic_expert_backup and args.elastic_ep_backend not in (None, "none")
    ):
        return (
            f"{settings.PD}=1, but elastic expert parallelism wants more of Mooncake's engine than moonpool "
            f"has: start without --elastic-ep-backend, or unset {settings.PD}"
        )
    flags = []
    if args.disaggregation_mode != "null":
        flags.append(("--disaggregation-transfer-backend", args.disaggregation_transfer_backend))
    elif args.encoder_only or args.language_only:
        flags.append(("--encoder-transfer-backend", args.encoder_transfer_backend))
    for flag, value in flags:
        if value not in BACKENDS:
            return (
                f"{settings.PD}=1, but {flag} is {value}, which moonpool has no part in: make it mooncake, "
                f"or unset {settings.PD}"
            )
    if flags and (device := _device(args)) not in ("cpu", "cuda"):
        return (
            f"{settings.PD}=1, but what this server hands over lies in memory of {device}, and moonpool's "
            f"engine moves memory of the host and of CUDA cards: unset {settings.PD}"
        )
    if flags and device == "cuda":
        _log.warning(
            "moonpool: %s=1 on a CUDA card: tested on a software device, and on no card yet", settings.PD
        )
    if not flags:
        _log.warning(
            "moonpool: %s=1, but this server hands nothing over: it is no prefill, decode, encoder or "
            "language server",
            settings.PD,
        )
    return ""


def _workers_without_plugins(args: Any, environment: Any) -> str:
    if args.dp_size > 1:
        return "data-parallel workers"
    if args.tp_size > 1 and args.enable_mm_global_cache and settings.is_on(settings.EMBEDDINGS, environment):
        return "tensor-parallel ranks"
    return ""


def _device(args: Any) -> str:
    if args.device:
        return str(args.device)
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
