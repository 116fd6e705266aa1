"""LMCache takes every connector adapter that it finds here: this is how ``moonpool://`` gets its meaning."""

from moonpool.connectors.lmcache.adapter_entry import MoonpoolAdapter

__all__ = ["MoonpoolAdapter"]
