"""Node, tenant and namespace of LMCache's chunks, from ``moonpool://...`` or from LMCache's own options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import ClassVar
from urllib.parse import parse_qsl, urlsplit

from moonpool.connectors.options import PoolOptions, flag, optional_text, refuse_unknown, text, wrong
from moonpool.connectors.pinned_arena import pin_bytes
from moonpool.core.config import paths

SCHEME = "moonpool"
THREADS_MAX = 64
_TRUE = {"1": True, "0": False}


@dataclass(frozen=True, slots=True)
class Settings(PoolOptions):
    """The options of the three plug points.

    threads: number of threads that copy.
    timeout_s: longest wait without progress, in seconds.
    form: what the bytes of the chunks are, in any words, where LMCache does not tell it.
    gpu_pin: bytes of the node's memory that a GPU reads chunks from in place; of "all" pinned_arena.ALL.
    """

    place: ClassVar[str] = SCHEME

    threads: int = 4
    timeout_s: float = 2.0
    form: str = ""
    gpu_pin: int = 0

    @classmethod
    def from_url(cls, url: str) -> Settings:
        """``moonpool://[NODE or /PATH][?tenant=T&namespace=N&...]``. Raises ConfigError."""
        parts = urlsplit(url)
        if parts.username or parts.password:
            raise wrong(
                f"{SCHEME}://",
                "password",
                f"is not an option: a secret has no place in a URL; set {paths.TOKEN_FILE_VARIABLE} in the "
                f"environment",
            )
        node = parts.netloc + parts.path.rstrip("/")
        given: dict[str, object] = {"node": node} if node and node != "localhost" else {}
        for key, value in parse_qsl(parts.query, keep_blank_values=True):
            if key in given or key == "node":
                raise wrong(f"{SCHEME}://", key, "stands twice")
            given[key] = value
        return cls.parse(given, f"{SCHEME}://")

    @classmethod
    def parse(cls, given: Mapping[str, object], place: str) -> Settings:
        """The settings of named options.

        given: the options.
        place: where they stand, for errors.

        Raises ConfigError for an unknown name, a secret, or a value of the wrong type.
        """
        refuse_unknown(place, given, [field.name for field in fields(cls)])
        default = cls()
        required = given.get("require_pool", False)
        threads = _number(place, "threads", given.get("threads", default.threads))
        if not (threads.is_integer() and 1 <= threads <= THREADS_MAX):
            raise wrong(place, "threads", f"must be a whole number from 1 to {THREADS_MAX}")
        timeout_s = _number(place, "timeout_s", given.get("timeout_s", default.timeout_s))
        if not 0 < timeout_s <= 3600:
            raise wrong(place, "timeout_s", "must be above 0 and at most 3600 seconds")
        settings = cls(
            optional_text(place, "node", given.get("node")),
            flag(
                place,
                "require_pool",
                _TRUE.get(required, required) if isinstance(required, str) else required,
            ),
            text(place, "tenant", given.get("tenant", default.tenant)),
            text(place, "namespace", given.get("namespace", default.namespace)),
            int(threads),
            timeout_s,
            optional_text(place, "form", given.get("form")) or "",
            pin_bytes(place, "gpu_pin", given.get("gpu_pin", default.gpu_pin)),
        )
        settings.socket()
        return settings

    @classmethod
    def of_server(cls, given: Mapping[str, object], place: str) -> Settings:
        """The same for the plug points of LMCache's server, whose GPU copies read LMCache's own memory only.
        Raises ConfigError."""
        settings = cls.parse(given, place)
        if settings.gpu_pin:
            raise wrong(
                place,
                "gpu_pin",
                "is an option of the remote connector (in-process mode): LMCache's server copies each chunk "
                "into its own memory first; leave it out",
            )
        return settings


def _number(place: str, key: str, value: object) -> float:
    try:
        if isinstance(value, int | float | str) and not isinstance(value, bool):
            return float(value)
    except ValueError:
        pass
    raise wrong(place, key, f"must be a number, not {value!r}")
