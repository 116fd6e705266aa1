"""Our keys of ``--hicache-storage-backend-extra-config``, checked once at start."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import ClassVar

from moonpool.connectors.options import SECRETS, PoolOptions, flag, optional_text, refuse_unknown, text, wrong

PLACE = "--hicache-storage-backend-extra-config"


@dataclass(frozen=True, slots=True)
class Settings(PoolOptions):
    """require_pool also refuses to start when this engine cannot use the pool."""

    place: ClassVar[str] = PLACE

    @classmethod
    def parse(cls, extra: Mapping[str, object]) -> Settings:
        """SGLang's own keys, of every version, stand beside ours, so an unknown key is an error only when it
        looks like one of ours. Raises ConfigError for that, and for a value of the wrong type."""
        known = [field.name for field in fields(cls)]
        ours = [key for key in extra if key in SECRETS or difflib.get_close_matches(key, known, 1, 0.75)]
        refuse_unknown(PLACE, ours, known)
        if not extra.get("interface_v1"):
            raise wrong(PLACE, "interface_v1", "must be 1, without which SGLang copies every page twice")
        return cls(
            node=optional_text(PLACE, "node", extra.get("node")),
            tenant=text(PLACE, "tenant", extra.get("tenant", "default")),
            namespace=text(PLACE, "namespace", extra.get("namespace", "default")),
            require_pool=flag(PLACE, "require_pool", extra.get("require_pool", False)),
        )
