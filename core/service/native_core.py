"""The C++ core, for processes that say how to build it where it is not there."""

from __future__ import annotations

import importlib
from types import ModuleType

from moonpool.core.errors import Unavailable


def native_core(operation: str) -> ModuleType:
    """The C++ core, moonpool._native. Raises Unavailable where it is not built."""
    try:
        return importlib.import_module("moonpool._native")
    except ImportError as error:
        raise Unavailable(
            f"the C++ core of moonpool is not built ({error}); run: pip install .",
            operation=operation,
            cause=error,
        ) from error
