"""What programs of C and C++ use of Moonpool. ``python -m moonpool.capi`` prints the folder with

lib/libtransfer_engine.so, include/transfer_engine_c.h    what they link instead of the original
                                                          `transfer_engine` (docs/tensorrt_llm.md)
include/moonpool_transport.h                              what transports outside are built against
                                                          (docs/outside_transports.md)
nixl/libplugin_MOONPOOL.so                                the backend plugin for NIXL (docs/nixl.md)
"""

from __future__ import annotations

from pathlib import Path


def root() -> Path:
    """The folder that holds them; for CMake it is MOONCAKE_ROOT, for NIXL ``nixl`` in it is the
    NIXL_PLUGIN_DIR."""
    return Path(__file__).resolve().parent
