"""What the entry point ``vllm.general_plugins`` calls in every process of vLLM, several times: cheap,
idempotent, and it never raises, because vLLM dies of a plugin that does."""

from __future__ import annotations

from moonpool.connectors.vllm import compat

NAMES = ("Mooncake", "Moonpool")  # which mean the same
CLASS = "Mooncake"
MODULE = "moonpool.connectors.vllm.connector"


def register() -> None:
    """Makes ``"kv_connector": "Mooncake"`` and ``"Moonpool"`` mean this connector; logs one sentence when it
    cannot."""
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
    for name in NAMES:
        try:
            KVConnectorFactory.register_connector(name, MODULE, CLASS)
        except ValueError as error:
            if not _is_ours(KVConnectorFactory, name):
                log.warning("moonpool: another plugin has taken the connector name %s (%s)", name, error)
        except Exception as error:  # the engine must start, also with a future factory
            log.warning(
                "moonpool: cannot register the connector %s (%s: %s)", name, type(error).__name__, error
            )


def _is_ours(factory: object, name: str) -> bool:
    """Whether the name is taken by an earlier call of register(): the loader closes over our module's
    path."""
    loader = getattr(factory, "_registry", {}).get(name)
    cells = getattr(loader, "__closure__", None) or ()
    return any(cell.cell_contents == MODULE for cell in cells)
