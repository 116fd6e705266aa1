"""What the entry point ``vllm.general_plugins`` calls in every process of vLLM, several times: cheap,
idempotent, and it never raises, because vLLM dies of a plugin that does."""

from __future__ import annotations

from typing import Any

from moonpool.connectors.vllm import compat
from moonpool.connectors.vllm.encoder import names as encoder

NAMES = ("Mooncake", "Moonpool")  # which mean the same
CLASS = "Mooncake"
MODULE = "moonpool.connectors.vllm.connector"


def register() -> None:
    """Makes ``"kv_connector": "Mooncake"`` and ``"Moonpool"`` mean this connector, and the same names in
    ``"ec_connector"`` that of encoder outputs; logs one sentence when it cannot."""
    log = compat.logger("plugin")
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    except ImportError as error:
        log.warning("moonpool: this vLLM has no KV connectors (%s), so %s is not available", error, CLASS)
        return
    version = compat.vllm_version()
    if compat.is_too_old(version):
        oldest = ".".join(map(str, compat.OLDEST))
        log.warning("moonpool: vLLM %s is too old for %s, which needs %s or newer", version, CLASS, oldest)
        return
    _register(KVConnectorFactory, NAMES, MODULE, CLASS)
    try:
        from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
    except ImportError:
        return  # a later vLLM may have no such connectors; its ec_transfer_config then refuses ours
    _register(ECConnectorFactory, encoder.NAMES, encoder.MODULE, encoder.CLASS)


def _register(factory: Any, names: tuple[str, ...], module: str, cls: str) -> None:
    log = compat.logger("plugin")
    for name in names:
        try:
            factory.register_connector(name, module, cls)
        except ValueError as error:
            loader = getattr(factory, "_registry", {}).get(name)
            if not encoder.loads_from(loader, module):  # else an earlier call of register() did it
                log.warning("moonpool: another plugin has taken the connector name %s (%s)", name, error)
        except Exception as error:  # the engine must start, also with a future factory
            log.warning(
                "moonpool: cannot register the connector %s (%s: %s)", name, type(error).__name__, error
            )
