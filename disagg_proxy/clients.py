"""The clients of a proxy, one row for each of their keys (``proxy.clients_file``): the tenant whose requests
the key sends, the highest priority that they may have, and what the key may do.

    [[clients]]
    name = "search"            # for logs; every row has another one
    key = "..."                # what the client sends: Authorization: Bearer KEY
    key_sha256 = "..."         # or its SHA-256 in hexadecimal, so that the file does not have it
    tenant = "search"          # default: the name; several rows may have one tenant
    max_priority = 10          # default: 0
    may = ["ask", "look"]      # default: ["ask"]
    store = false              # nothing of its requests is saved in the pool; default: true
    load = false               # nothing is loaded for them; default: true
    keep_s = 600               # what is saved is evicted last, while it is used that often; default: 0, no

    ask       requests for engines, /v1/models, /query
    look      GET /engines, /ui/data: addresses and failures of engines
    register  POST /register, /unregister: an engine that reads prompts

A right that no row has is open to no client.
"""

from __future__ import annotations

import hashlib
import logging
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from moonpool.core.errors import ConfigError
from moonpool.disagg_proxy.setting_error import bad
from moonpool.disagg_proxy.tenant_salts import salt_of

Right = Literal["ask", "look", "register"]
RelayKey = tuple[bytes, str]  # SHA-256 of a key, salt of its tenant
PRIORITY_MOST = 100
KEEP_S_MAX = 49 * 86_400  # a node's longest soft pin
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_log = logging.getLogger("moonpool.proxy")
_bad = partial(bad, "clients_file")


class Client(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One row, with ``key`` or ``key_sha256``. tenant: "": as the name. max_priority: -100 to 100; a request
    that claims more gets this. load, store: whether engines may load for its requests from the pool, and save
    in it; keep_s: the soft pin of what they save (dispatch/request_switches.py).
    """

    name: str
    key: Annotated[str, msgspec.Meta(pattern=r"^[\x21-\x7e]+\Z", max_length=1024)] = ""
    key_sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-fA-F]{64}\Z")] = ""
    tenant: Annotated[str, msgspec.Meta(pattern=r"^[\x21-\x7e]*\Z", max_length=128)] = ""
    max_priority: Annotated[int, msgspec.Meta(ge=-PRIORITY_MOST, le=PRIORITY_MOST)] = 0
    may: Annotated[frozenset[Right], msgspec.Meta(min_length=1)] = frozenset({"ask"})
    load: bool = True
    store: bool = True
    keep_s: Annotated[int, msgspec.Meta(ge=0, le=KEEP_S_MAX)] = 0

    @property
    def tenant_name(self) -> str:
        """The tenant of its requests."""
        return self.tenant or self.name

    @property
    def digest(self) -> bytes:
        """SHA-256 of its key."""
        if self.key_sha256:
            return bytes.fromhex(self.key_sha256)
        return hashlib.sha256(self.key.encode()).digest()


class _File(msgspec.Struct, forbid_unknown_fields=True):
    clients: list[dict[str, object]] = []


class Clients:
    """The rows in force. ``reload`` replaces them; all else may be called on any thread meanwhile."""

    def __init__(self, path: str, *, registers: bool, share: bool = False) -> None:
        """registers: whether engines may register over HTTP. share: tenants find each other's blocks. Raises
        ConfigError, with the row at fault."""
        self._path = path
        self._registers = registers
        self._share = share
        self._by_digest = _by_digest(read_clients(path, registers=registers))

    @property
    def asking(self) -> list[RelayKey]:
        """The keys that may ask, for ``Relay.set_api_keys``."""
        rows = self._by_digest.items()
        return [(digest, self.salt_of(each)) for digest, each in rows if "ask" in each.may]

    def salt_of(self, client: Client) -> str:
        """What separates its tenant's blocks from those of others; "": nothing does."""
        return "" if self._share else salt_of(client.tenant_name)

    def find(self, authorization: bytes | None) -> Client | None:
        """The client whose key the field Authorization has; None: no row has it.

        The lookup is by digest: its time says nothing of a key, since no client can choose a digest.
        """
        scheme, _, key = (authorization or b"").partition(b" ")
        if scheme.lower() != b"bearer":
            return None
        return self._by_digest.get(hashlib.sha256(key.strip()).digest())

    def reload(self) -> bool:
        """Reads the file again; with an error in it, the rows stay as they are. Returns whether it was
        read."""
        try:
            rows = read_clients(self._path, registers=self._registers)
        except ConfigError as error:
            _log.error("SIGHUP: the clients stay as they were: %s", error)
            return False
        self._by_digest = _by_digest(rows)
        _log.info("SIGHUP: %d clients are in force", len(rows))
        return True

    def reload_asking(self) -> list[RelayKey] | None:
        """``reload``, and then ``asking``; None: nothing was read."""
        return self.asking if self.reload() else None


class KeysFor:
    """The keys of clients with one right."""

    def __init__(self, clients: Clients, right: Right) -> None:
        self._clients = clients
        self._right = right

    def fits(self, authorization: bytes | None) -> bool:
        """Whether the field Authorization has the key of a client with this right."""
        client = self._clients.find(authorization)
        return client is not None and self._right in client.may


def read_clients(path: str, *, registers: bool) -> list[Client]:
    """The rows of a file. Raises ConfigError with the number and name of the row at fault, never its key;
    also when no row may ask, or none may register where engines register."""
    try:
        table = msgspec.convert(tomllib.loads(Path(path).read_text()), _File)
    except (OSError, UnicodeDecodeError) as error:
        raise _bad(f"the clients cannot be read from {path}: {error}") from error
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise _bad(f"{path} is no file of clients, [[clients]] with name and key each: {error}") from error
    rows = [_client(path, number, row) for number, row in enumerate(table.clients, 1)]
    _require_distinct(path, rows)
    _require_rights(path, rows, registers=registers)
    return rows


def _require_distinct(path: str, rows: Sequence[Client]) -> None:
    names: dict[str, int] = {}
    keys: dict[bytes, int] = {}
    for number, row in enumerate(rows, 1):
        if (before := names.setdefault(row.name, number)) != number:
            raise _bad(f"rows {before} and {number} of {path} are both called {row.name!r}; rename one")
        if (before := keys.setdefault(row.digest, number)) != number:
            raise _bad(
                f"rows {before} and {number} ({row.name}) of {path} have the same key; give each its own"
            )


def _require_rights(path: str, rows: Sequence[Client], *, registers: bool) -> None:
    for number, row in enumerate(rows, 1):
        if row.may >= {"ask", "register"}:
            raise _bad(
                f"row {number} ({row.name}) of {path} may ask and register, so a client could register an "
                f"engine and read other clients' prompts; give the registrar a row and a key of its own"
            )
    rights = frozenset[Right]().union(*(row.may for row in rows))
    if "ask" not in rights:
        raise _bad(f'no row of {path} may ask, so no client could use the engines; give one may = ["ask"]')
    if registers and "register" not in rights:
        raise _bad(
            f"no row of {path} may register, so --discovery http would find no engine; give one "
            f'may = ["register"]'
        )


def _client(path: str, number: int, row: Mapping[str, object]) -> Client:
    name = row.get("name")
    where = f"row {number} ({name}) of {path}" if _is_name(name) else f"row {number} of {path}"
    if not _is_name(name):
        raise _bad(f"{where} has no name of 1 to 64 letters, digits, '_', '.' or '-'")
    try:
        client = msgspec.convert(row, Client)
    except msgspec.ValidationError as error:
        raise _bad(f"{where}: {error}") from error
    if bool(client.key) == bool(client.key_sha256):
        raise _bad(f"{where} has key or key_sha256, and not both")
    return client


def _is_name(name: object) -> bool:
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def _by_digest(rows: Iterable[Client]) -> dict[bytes, Client]:
    return {each.digest: each for each in rows}
