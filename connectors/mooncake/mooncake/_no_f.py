"""Targets of NVMe over Fabrics, which moonpool does not use: each method returns a code and logs why."""

from __future__ import annotations

from ._codes import Unsupported, code_of


class MooncakeDistributedNoFRegister:
    """Registers nothing: a node's SSDs are its own (`--ssd`, `ssd_offload_path`)."""

    def real_register(
        self, local: str, port: int, target: str, size: int, offset: int, flags: int, master: str, /
    ) -> int:
        """A code: not supported."""
        return _refused("real_register")

    def real_unregister_by_endpoint(
        self, local: str, port: int, target: str, flags: int, master: str, /
    ) -> int:
        """A code: not supported."""
        return _refused("real_unregister_by_endpoint")


def _refused(operation: str) -> int:
    error = Unsupported(
        "moonpool uses no NVMe-oF targets; give a node an SSD of its own with ssd_offload_path"
    )
    return int(code_of(error, operation))
