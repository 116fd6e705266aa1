"""What our entry point does to LMCache, and what it does not."""

from __future__ import annotations

import sys

import lmcache
import lmcache.v1.distributed.l2_adapters as l2_adapters
import lmcache.v1.storage_backend.connector as connector
import pytest
from lmcache.v1.distributed.l2_adapters import factory
from lmcache.v1.distributed.l2_adapters.config import get_registered_l2_adapter_types
from lmcache.v1.platform._device_detect import _build_backend_registry

from moonpool.connectors.lmcache import plugin


def test_it_is_loaded_and_offers_no_device() -> None:
    assert not _build_backend_registry()["moonpool"].is_available()
    assert lmcache.torch_device_type == "cpu"


def test_each_package_has_one_folder_more() -> None:
    for package in (connector, l2_adapters):
        assert [*package.__path__][1:] == [plugin.FOLDERS[package.__name__]]
    assert {"moonpool", "plugin", "native_plugin"} <= set(get_registered_l2_adapter_types())


def test_loading_it_again_changes_nothing() -> None:
    before = len(sys.meta_path), [*connector.__path__]
    plugin.extend()
    assert (len(sys.meta_path), [*connector.__path__]) == before


def test_a_package_that_was_there_before_gets_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    finders = [finder for finder in sys.meta_path if isinstance(finder, plugin.OneMoreFolder)]
    (finder,) = finders
    folder = connector.__path__.pop()
    ours = f"{l2_adapters.__name__}.moonpool_l2_adapter"
    pending = [module for module in factory._PENDING_MODULES if module != ours]
    monkeypatch.setattr(factory, "_PENDING_MODULES", pending)
    sys.meta_path.remove(finder)
    try:
        plugin.extend()
        assert connector.__path__[-1] == folder
        assert ours in pending  # it lists its modules once only
        assert l2_adapters.__path__[-1] == l2_adapters.__path__[-2] == plugin.FOLDERS[l2_adapters.__name__]
    finally:
        l2_adapters.__path__.pop()
    assert sum(isinstance(finder, plugin.OneMoreFolder) for finder in sys.meta_path) == 1
