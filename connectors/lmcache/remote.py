"""The name of ``adapter_entry`` in configurations: ``module_path: moonpool.connectors.lmcache.remote``."""

from moonpool.connectors.lmcache.adapter_entry import MoonpoolAdapter

__all__ = ["MoonpoolAdapter"]
