"""Parses the names of sources in settings: ``KIND`` or ``KIND:REST``. Values only."""

from __future__ import annotations

from moonpool.disagg_proxy.setting_error import bad

KINDS = ("file", "http", "etcd", "kubernetes")
_EXAMPLES = (
    "file:/etc/engines.yaml, http, etcd:http://host:2379/moonpool/engines/ or kubernetes:NAMESPACE/app=vllm"
)


def parse_source_url(text: str) -> tuple[str, str]:
    """(one of KINDS, what follows the colon). Raises ConfigError for text that names no source."""
    kind, _, rest = text.partition(":")
    if kind not in KINDS or (kind == "http") != (not rest) or (kind == "http" and ":" in text):
        raise bad("discovery", f"engines are discovered by {_EXAMPLES}, not {text!r}")
    return kind, rest
