"""Constructs the sources that the settings name."""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.disagg_proxy.discovery.etcd_source import EtcdSource
from moonpool.disagg_proxy.discovery.file_source import FileSource
from moonpool.disagg_proxy.discovery.kubernetes_source import KubernetesSource
from moonpool.disagg_proxy.discovery.source import Source
from moonpool.disagg_proxy.discovery.source_url import SourceUrl, parse_source_url


def make_sources(names: Sequence[str], registry: Source | None = None) -> tuple[Source, ...]:
    """One source for each distinct name, in order. registry: the source for the name ``http``. Raises
    ConfigError for an unknown name."""
    return tuple(_make(parse_source_url(name), registry) for name in dict.fromkeys(names))


def _make(name: SourceUrl, registry: Source | None) -> Source:
    if name.kind == "http":
        assert registry is not None
        return registry
    if name.kind == "etcd":
        return EtcdSource(name.rest)
    if name.kind == "kubernetes":
        return KubernetesSource(name.rest)
    return FileSource(name.rest)
