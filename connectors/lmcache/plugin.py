"""What LMCache loads by itself: the entry point ``lmcache.device_plugins``, the one hook that it runs in
every process before it looks for connectors.

It offers no device. It lets two packages of LMCache have one more folder each, in_tree/*, in which LMCache
then finds a connector adapter and an L2 adapter, as it finds its own. So ``remote_url: moonpool://`` and
``{"type": "moonpool"}`` need no module path. LMCache's documented options, which do, work without this.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from lmcache.v1.platform.base.device_spec import DeviceSpec

NAME = "moonpool"
_IN_TREE = Path(__file__).resolve().parent / "in_tree"
FOLDERS = {
    "lmcache.v1.storage_backend.connector": str(_IN_TREE / "connector"),
    "lmcache.v1.distributed.l2_adapters": str(_IN_TREE / "l2_adapters"),
}


class OneMoreFolder(MetaPathFinder):
    """Finds the packages of FOLDERS where they are, and adds our folder to each."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a package in FOLDERS, with our folder in its search path; None for any other module."""
        folder = FOLDERS.get(fullname)
        spec = PathFinder.find_spec(fullname, path, target) if folder else None
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec.submodule_search_locations = [*spec.submodule_search_locations, str(folder)]
        return spec


def extend() -> None:
    """Once a process; a package that is there already gets its folder now."""
    if any(isinstance(finder, OneMoreFolder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, OneMoreFolder())
    for name, folder in FOLDERS.items():
        package = sys.modules.get(name)
        if package is None:
            continue
        package.__path__.append(folder)
        # This one has listed its modules already, to be imported when a type is not known.
        pending = getattr(package, "add_pending_module", None)
        if pending is not None:
            for module in Path(folder).glob("*_l2_adapter.py"):
                pending(f"{name}.{module.stem}")


class NoDevice(DeviceSpec):  # type: ignore[misc]
    """Never available; being loaded is all it is for."""

    @property
    def device_type(self) -> str:
        """The name of the device."""
        return NAME

    @property
    def backend_name(self) -> str:
        """The name of the backend."""
        return NAME

    def is_available(self) -> bool:
        """False: there is no such device."""
        return False


extend()
