"""Which memory, CPUs, NICs, GPUs and drives this machine has, and which of them are near each other.

The C++ core reads them (core/csrc/topology), where transports rank their devices by the same functions; this
folder makes tables and JSON of it. Nothing here opens a device.
"""

from moonpool.core.topology.machine import Near, as_json, matrix, memories, read, usable_nics

__all__ = ["Near", "as_json", "matrix", "memories", "read", "usable_nics"]
