"""Run by a Python with SGLang: the short name through its real parser, arguments and hooks."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json

from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import ServerArgs

from moonpool.connectors.sglang import short_name


def parsed(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return parser.parse_args(["--model-path=no/such/model", *flags])


def main() -> None:
    try:
        parsed("--hicache-storage-backend=moonpool")
    except SystemExit:
        pass  # not known yet
    else:
        raise AssertionError("SGLang took the name without us")
    short_name.register()
    HookRegistry.apply_hooks()
    assert parsed("--hicache-storage-backend=file").hicache_storage_backend == "file"
    namespace = parsed(
        "--hicache-storage-backend=moonpool", '--hicache-storage-backend-extra-config={"node":"n"}'
    )
    made = (
        ServerArgs.__new__(ServerArgs) if dataclasses.is_dataclass(ServerArgs) else ServerArgs(model_path="")
    )
    made.hicache_storage_backend = namespace.hicache_storage_backend
    made.hicache_storage_backend_extra_config = namespace.hicache_storage_backend_extra_config
    with contextlib.suppress(Exception):  # there is no such model, which it finds out behind our hook
        made.__post_init__() if dataclasses.is_dataclass(made) else made.resolve_once()
    assert made.hicache_storage_backend == "dynamic"
    extra = json.loads(made.hicache_storage_backend_extra_config)
    assert (extra["class_name"], extra["node"]) == ("MoonpoolHiCache", "n")

    import sglang.srt.managers.scheduler as scheduler
    from sglang.srt.managers.io_struct import AttachHiCacheStorageReqInput

    HookRegistry.reset()
    short_name.register()
    HookRegistry.apply_hooks()
    request = AttachHiCacheStorageReqInput(hicache_storage_backend="moonpool")
    stub = argparse.Namespace(enable_hierarchical_cache=False)
    answer = scheduler.Scheduler.attach_hicache_storage_wrapped(stub, request)
    assert not answer.success
    assert request.hicache_storage_backend == "dynamic"
    print("the short name is understood")


if __name__ == "__main__":
    main()
