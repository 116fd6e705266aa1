"""Our keys of ``--hicache-storage-backend-extra-config``, checked once at start."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from moonpool.core import paths
from moonpool.core.errors import ConfigError

_PLACE = "--hicache-storage-backend-extra-config"
_OURS = ("node", "tenant", "namespace", "require_pool")


@dataclass(frozen=True, slots=True)
class Settings:
    """node: socket path, node name, or None for the default socket; tenant, namespace: whose pages, see
    docs/keys.md; require_pool: refuse to start without a node, or when this engine cannot use the pool."""

    node: str | None = None
    tenant: str = "default"
    namespace: str = "default"
    require_pool: bool = False

    @classmethod
    def parse(cls, extra: Mapping[str, object]) -> Settings:
        """SGLang's own keys, of every version, stand beside ours, so an unknown key is an error only when it
        looks like one of ours. Raises ConfigError for that, and for a value of the wrong type."""
        for key in extra:
            if key in ("token", "cluster_token"):
                raise _wrong(
                    key,
                    f"{key} is not an option: a secret has no place on a command line; set "
                    f"{paths.TOKEN_FILE_VARIABLE} in the environment",
                )
            near = difflib.get_close_matches(key, _OURS, n=1, cutoff=0.75)
            if near and key not in _OURS:
                raise _wrong(key, f"the key {key!r} is not known; did you mean {near[0]!r}?")
        if not extra.get("interface_v1"):
            raise _wrong(
                "interface_v1",
                'moonpool needs "interface_v1": 1, without which SGLang copies every page a second time',
            )
        require = extra.get("require_pool", False)
        if not isinstance(require, bool):
            raise _wrong("require_pool", f"require_pool must be true or false, not {require!r}")
        return cls(
            node=None if extra.get("node") is None else _text("node", extra["node"]),
            tenant=_text("tenant", extra.get("tenant", "default")),
            namespace=_text("namespace", extra.get("namespace", "default")),
            require_pool=require,
        )

    def socket(self) -> Path:
        """The Unix socket to connect to. Raises ConfigError for an address of another host."""
        if self.node is None:
            return paths.default_node_socket()
        if "/" in self.node:
            return paths.check_socket_path(Path(self.node))
        if ":" in self.node:
            raise _wrong(
                "node",
                f"node is {self.node!r}: an engine uses a node of its own host; give the path of its Unix "
                f"socket, or leave it out for the default one",
            )
        return paths.node_socket(self.node)


def _text(key: str, value: object) -> str:
    if isinstance(value, str) and value:
        return value
    raise _wrong(key, f"{key} must be a non-empty text, not {value!r}")


def _wrong(key: str, sentence: str) -> ConfigError:
    return ConfigError(f"{_PLACE}: {sentence}", operation="config", key=key)
