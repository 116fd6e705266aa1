"""What the entry point ``vllm.general_plugins`` calls in every process of vLLM, several times: cheap,
idempotent, and it never raises, because vLLM dies of a plugin that does."""

from __future__ import annotations

from moonpool.connectors.vllm import compat

NAME = "Mooncake"
MODULE = "moonpool.connectors.vllm.connector"


def register() -> None:
    """Makes ``"kv_connector": "Mooncake"`` mean this connector; logs one sentence when it cannot."""
    log = compat.logger("plugin")
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    except ImportError as error:
        log.warning("moonpool: this vLLM has no KV connectors (%s), so %s is not available", error, NAME)
        return
    version = compat.vllm_version()
    if compat.is_too_old(version):
        oldest = ".".join(map(str, compat.OLDEST))
        log.warning("moonpool: vLLM %s is too old for %s, which needs %s or newer", version, NAME, oldest)
        return
    try:
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)
    except ValueError as error:
        if not _is_ours(KVConnectorFactory):
            log.warning("moonpool: another plugin has taken the connector name %s (%s)", NAME, error)
    except Exception as error:  # the engine must start, also with a future factory
        log.warning("moonpool: cannot register the connector %s (%s: %s)", NAME, type(error).__name__, error)


def _is_ours(factory: object) -> bool:
    """Whether the name is taken by an earlier call of register(): the loader closes over our module's
    path."""
    loader = getattr(factory, "_registry", {}).get(NAME)
    cells = getattr(loader, "__closure__", None) or ()
    return any(cell.cell_contents == MODULE for cell in cells)
