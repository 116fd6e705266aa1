"""The names of the connector, and whether an engine's configuration means it."""

from __future__ import annotations

from typing import Any

NAMES = ("Mooncake", "Moonpool")  # which mean the same
CLASS = "Mooncake"
MODULE = "moonpool.connectors.vllm.encoder.connector"


def is_ours(transfer: Any) -> bool:
    """Whether vLLM makes this connector of its ``ec_transfer_config``. A registered name takes precedence
    over a module path."""
    name = getattr(transfer, "ec_connector", None)
    if name not in NAMES:
        return False
    loader = _registry().get(name)
    if loader is not None:
        return loads_from(loader, MODULE)
    return getattr(transfer, "ec_connector_module_path", None) in (None, MODULE)


def loads_from(loader: object, module: str) -> bool:
    """Whether a loader that a factory of vLLM made is that of a class in ``module``, whose path it closes
    over."""
    cells = getattr(loader, "__closure__", None) or ()
    return any(cell.cell_contents == module for cell in cells)


def _registry() -> dict[str, object]:
    try:
        from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
    except ImportError:
        return {}
    return getattr(ECConnectorFactory, "_registry", {})
