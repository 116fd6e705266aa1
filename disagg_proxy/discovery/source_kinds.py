"""Constructs the sources that the settings name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from moonpool.disagg_proxy.discovery.etcd_source import EtcdSource
from moonpool.disagg_proxy.discovery.file_source import FileSource
from moonpool.disagg_proxy.discovery.kubernetes_source import KubernetesSource
from moonpool.disagg_proxy.discovery.source import Source
from moonpool.disagg_proxy.discovery.source_url import parse_source_url

_MADE: Mapping[str, Callable[[str], Source]] = {
    "file": FileSource,
    "etcd": EtcdSource,
    "kubernetes": KubernetesSource,
}


def make_sources(names: Sequence[str], registry: Source | None = None) -> tuple[Source, ...]:
    """One source for each distinct name, in order. registry: the source for the name ``http``. Raises
    ConfigError for an unknown name."""
    made: dict[str, Source] = {} if registry is None else {"http": registry}
    for name in names:
        kind, rest = parse_source_url(name)
        if name not in made:
            made[name] = _MADE[kind](rest)
    return tuple(made[name] for name in dict.fromkeys(names))
