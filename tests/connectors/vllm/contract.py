"""What the vLLM of this interpreter says of its connectors' hooks, and what ours are: JSON to the descriptor
that is the argument. Run by test_contract.py with the interpreter that has vLLM."""

from __future__ import annotations

import inspect
import json
import os
import sys
from typing import Any

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1.core.block_pool import BlockPool

from moonpool.connectors.vllm import compat
from moonpool.connectors.vllm.connector import Mooncake
from moonpool.connectors.vllm.encoder.connector import Mooncake as EncoderConnector

Hook = Any  # a function, a class method or a property


def hooks(of: type) -> dict[str, Hook]:
    return {
        name: value
        for name, value in vars(of).items()
        if not name.startswith("_") and (callable(value) or isinstance(value, classmethod | property))
    }


def function(hook: Hook) -> Any:
    if isinstance(hook, property):
        return hook.fget
    return hook.__func__ if isinstance(hook, classmethod) else hook


def difference(theirs: Hook, ours: Hook) -> str:
    """Why a call that fits vLLM's hook may not fit ours; "" when it does."""
    if {type(theirs), type(ours)} & {classmethod, property} and type(theirs) is not type(ours):
        return f"{type(ours).__name__}, and vLLM's is {type(theirs).__name__}"
    wanted = inspect.signature(function(theirs)).parameters
    given = inspect.signature(function(ours)).parameters
    takes = {one.kind for one in given.values()}
    names = list(given)
    for place, (name, one) in enumerate(wanted.items()):
        if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
            if one.kind not in takes:
                return f"does not take {one}"
        elif name in given:
            if one.kind is not one.KEYWORD_ONLY and names.index(name) != place:
                return f"has {name} at another place"
            if one.default is not one.empty and given[name].default is one.empty:
                return f"requires {name}"
        elif not {one.VAR_POSITIONAL, one.VAR_KEYWORD} <= takes:
            return f"does not take {name}"
    more = [
        name
        for name, one in given.items()
        if name not in wanted
        and one.default is one.empty
        and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]
    return f"requires {', '.join(more)}" if more else ""


def compared(theirs: dict[str, Hook], ours: dict[str, Hook]) -> dict[str, Any]:
    return {
        "theirs": sorted(theirs),
        "ours": sorted(ours),
        "differ": {
            name: why for name in theirs if name in ours and (why := difference(theirs[name], ours[name]))
        },
    }


def main() -> None:
    answer = {
        "version": compat.vllm_version(),
        "kv": compared(hooks(base.KVConnectorBase_V1) | hooks(base.SupportsHMA), hooks(Mooncake)),
        "encoder": compared(hooks(ECConnectorBase), hooks(EncoderConnector)),
        "watches": [compat.watch_weights(), compat.watch_adapters(), compat.watch_idle()],
        "cached_block": list(inspect.signature(BlockPool.get_cached_block).parameters),
    }
    with os.fdopen(int(sys.argv[1]), "w") as out:
        json.dump(answer, out)


if __name__ == "__main__":
    main()
