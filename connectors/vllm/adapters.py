"""The names of this engine's LoRA adapters in the pool: digests of their files. Runs on the scheduler's
thread; background threads read the files.

A digest is valid only for the files that the engine loaded. So ``Adapters`` takes the files' identities
before vLLM loads an adapter, and compares them after the load and again with each request:

    add_lora (what a server calls)   before and after the call, which loads the adapter
    a request with a new adapter     at its arrival, and with a later request once this one has output tokens:
                                     vLLM loads the adapter in between, so the first request has no name

vLLM may drop an adapter and load it from its path again at any time (with load_inplace in each step, so a
worker checks once more before it saves), and its own prefix cache knows adapters by name and path. So an
adapter that was changed in place has no name here until the engine has loaded it again and its prefix cache
is empty.
"""

from __future__ import annotations

import hashlib
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moonpool.connectors.adapters import adapter_files
from moonpool.connectors.files import File, Kept, Reading, digest_of_files
from moonpool.connectors.vllm.engine_types import Request
from moonpool.core.errors import ConfigError

ADAPTERS_MAX = 4096
CACHED_MAX = 65_536
SENTENCES_MAX = 20
READ_WAIT_S = 1.0  # beside the load of an adapter, which reads the same bytes
CLOCK_STEP_NS = 20_000_000  # files changed twice within one step have the same time stamp

STALE = (
    "vLLM's prefix cache may hold KV of other bytes that this name stood for; load it under another name or "
    "from another path, or reset the prefix cache"
)

Files = tuple[File, ...]


@dataclass(slots=True)
class Adapter:
    """One adapter that the engine has or is about to load.

    cached_as: the key under which vLLM's prefix cache knows it.
    witness: the request with which it is loaded, until that request has an answer.
    why: why the adapter has no name, or "".
    """

    path: str
    cached_as: tuple[str, str]
    files: Files = ()
    reading: Reading | None = None
    witness: Request | None = None
    why: str = ""


class Adapters:
    """Names LoRA adapters by all bytes of their files."""

    def __init__(
        self,
        *,
        form: str,
        refusal: str,
        cached_by_path: bool,
        log: logging.Logger,
        kept: Kept | None = None,
    ) -> None:
        """form: how this engine applies adapters, as far as that changes KV.
        refusal: why no adapter has a name here, or "".
        cached_by_path: whether vLLM's prefix cache distinguishes adapters of one name by their paths.
        log: for messages.
        kept: digests of files that are known already; None: those of this host.
        """
        self._form = form
        self._refusal = refusal
        self._cached_by_path = cached_by_path
        self._log = log
        self._kept = kept
        self._adapters: dict[int, Adapter] = {}
        self._cached: dict[tuple[str, str], bytes] = {}  # whose KV vLLM's prefix cache may hold
        self._overflowed = False
        self._sentences = 0

    def name(self, request: Request) -> str | None:
        """The name in the pool of this request's adapter; None: its bytes are unknown, or not known yet."""
        lora = request.lora_request
        if self._refusal:
            self._say(lora, self._refusal)
            self._sentences = SENTENCES_MAX
            return None
        adapter = self._adapters.get(lora.lora_int_id)
        if adapter is None:
            adapter = self._first_seen(lora)
            adapter.witness = request
        if not adapter.why and adapter.path != lora.lora_path:
            self._void(lora, adapter, f"its number was that of {adapter.path!r} before")
        if adapter.why or not self._is_loaded(adapter, request):
            return None
        if self._look(lora) != adapter.files:
            self._void(lora, adapter, "its files were changed after they were loaded")
            return None
        reading = adapter.reading
        if reading is None or not reading.over.is_set():
            return None
        if reading.trouble:
            self._void(lora, adapter, reading.trouble)
            return None
        is_3d = " 3d" if getattr(lora, "is_3d_lora_weight", False) else ""
        return f"{digest_of_files(adapter.files, reading.digests)} {self._form}{is_3d}"

    def files(self, request: Request) -> Files:
        """Those of the request's adapter, which has a name."""
        return self._adapters[request.lora_request.lora_int_id].files

    def loading(self, lora: Any) -> bool:
        """The engine was told to load the adapter and does so after this call. Returns whether that replaces
        an adapter of the same number: then the KV of its requests has another name from now on."""
        number = lora.lora_int_id
        replaces = number in self._adapters
        if self._refusal or (replaces and not getattr(lora, "load_inplace", False)):
            return False  # vLLM keeps the one that it has
        self._adapters.pop(number, None)
        self._take(lora)
        return replaces

    def loaded(self, lora: Any, *, well: bool) -> None:
        """The load that ``loading`` announced has ended. Waits a moment for the files to be read.

        well: whether it ended without an error.
        """
        adapter = self._adapters.get(lora.lora_int_id)
        if self._refusal or adapter is None or adapter.why:
            return
        if not well:
            self._void(lora, adapter, "the engine could not load it")
        elif self._look(lora) != adapter.files:
            self._void(lora, adapter, "its files were changed while they were loaded")
        elif adapter.reading is not None:
            adapter.reading.over.wait(READ_WAIT_S)

    def removed(self, number: int) -> None:
        """The engine has dropped the adapter of this number."""
        self._adapters.pop(number, None)

    def cache_was_reset(self) -> None:
        """vLLM's prefix cache holds nothing any more."""
        self._cached = {}
        for adapter in reversed(self._adapters.values()):  # the last one that was loaded first
            mark = _mark(adapter.files)
            if self._cached.setdefault(adapter.cached_as, mark) != mark:
                adapter.why = adapter.why or STALE
            elif adapter.why == STALE:
                adapter.why = ""

    # The parts

    def _first_seen(self, lora: Any) -> Adapter:
        """An adapter that no add_lora has loaded: the engine loads it with this request."""
        if self._overflowed:
            adapter = Adapter(lora.lora_path, self._cache_key(lora), why="there were too many adapters")
            self._say(lora, adapter.why)
            return adapter
        return self._take(lora)

    def _take(self, lora: Any) -> Adapter:
        """Looks at the files that the engine is about to load, and begins to read them."""
        adapter = Adapter(lora.lora_path, self._cache_key(lora))
        while len(self._adapters) >= ADAPTERS_MAX:
            self._overflowed = True  # one that is seen first from here on may have been loaded long ago
            del self._adapters[next(iter(self._adapters))]
        self._adapters[lora.lora_int_id] = adapter
        if getattr(lora, "lora_tensors", None) or getattr(lora, "tensorizer_config_dict", None):
            self._void(lora, adapter, "its tensors do not come from the files of its path")
            return adapter
        try:
            adapter.files = self._settled(Path(lora.lora_path).expanduser())
        except ConfigError as error:
            self._void(lora, adapter, str(error))
            return adapter
        adapter.reading = Reading(adapter.files, self._kept)
        mark = _mark(adapter.files)
        if len(self._cached) < CACHED_MAX:
            self._cached.setdefault(adapter.cached_as, mark)
        if self._cached.get(adapter.cached_as) != mark:
            self._void(lora, adapter, STALE)
        return adapter

    def _is_loaded(self, adapter: Adapter, request: Request) -> bool:
        """Whether the engine has loaded the adapter since its files were looked at."""
        witness = adapter.witness
        if witness is None:
            return True
        if witness.num_output_tokens > 0:
            adapter.witness = None
            return True
        if witness.status.name.startswith("FINISHED"):
            adapter.witness = request
        return False

    def _look(self, lora: Any) -> Files:
        """The files as they are now; () when there are none."""
        try:
            return adapter_files(Path(lora.lora_path).expanduser())
        except ConfigError:
            return ()

    def _settled(self, folder: Path) -> Files:
        """The files, once none can change again without changing its time stamp. Waits for one step of the
        file system's clock at most. Raises ConfigError."""
        files = adapter_files(folder)
        age_ns = time.time_ns() - max(file.identity.changed_ns for file in files)
        if 0 <= age_ns < CLOCK_STEP_NS:
            time.sleep((CLOCK_STEP_NS - age_ns) / 1e9)
            files = adapter_files(folder)
        return files

    def _cache_key(self, lora: Any) -> tuple[str, str]:
        return str(lora.lora_name), str(lora.lora_path) if self._cached_by_path else ""

    def _void(self, lora: Any, adapter: Adapter, why: str) -> None:
        adapter.why, adapter.witness = why, None
        self._say(lora, why)

    def _say(self, lora: Any, why: str) -> None:
        self._sentences += 1
        if self._sentences <= SENTENCES_MAX:
            self._log.warning(
                "moonpool: requests with the LoRA adapter %r are computed without the pool: %s",
                lora.lora_name,
                why,
            )


def _mark(files: Files) -> bytes:
    return hashlib.sha256(repr(files).encode()).digest()[:16]
