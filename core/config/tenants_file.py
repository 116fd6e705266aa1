"""The file of tenants (``cluster.tenants_file``): the keys by which their clients open nodes and masters.

    [[tenants]]
    name = "search"            # the tenant; it may have several rows, one for each role
    role = "writer"            # reader, writer or admin
    keys = ["3f9c..."]         # one, or two while one replaces the other; 16 to 1,024 visible ASCII letters
    salt = "a591..."           # of the hashes of its keys; the same in all rows of the tenant; default: none
    dram_min = "4GiB"          # limits of the tenant at each node, in one of its rows; all are optional
    dram_max = "16GiB"
    ssd_max = "200GiB"
    pins_max = "2GiB"
    bytes_per_s = "500MiB"

    reader   looks up and reads
    writer   also puts, replaces and removes by name
    admin    also lists names, and removes by prefix or pattern

Nodes and masters have the same file, of mode 0600. It has secrets: neither an error nor a log shows them.
"""

from __future__ import annotations

import os
import stat
import tomllib
from collections.abc import Iterable
from typing import Annotated, Literal, NamedTuple, get_args

import msgspec

from moonpool.core.config.file_state import file_state
from moonpool.core.config.units import format_size, parse_size
from moonpool.core.errors import ConfigError

TenantRole = Literal["reader", "writer", "admin"]
ROLES: tuple[TenantRole, ...] = get_args(TenantRole)
KEY_BYTES_MIN = 16  # one that is shorter can be guessed from one recorded handshake
SETTING = "cluster.tenants_file"
# Columns: sizes, as "4GiB" or a number of bytes.
LIMITS = ("dram_min", "dram_max", "ssd_max", "pins_max", "bytes_per_s")
DRAM_MAX_MIN = 2 << 20  # one piece of memory that moves, at a large node

Key = Annotated[str, msgspec.Meta(pattern=r"^[\x21-\x7e]+\Z", max_length=1024)]


Bytes = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class TenantLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What a tenant may have at each node, in bytes; None: no such limit.

    dram_min: memory that is the tenant's own. dram_max: the most memory. ssd_max: the most of all
    directories. pins_max: of objects that its clients have pinned at one time. bytes_per_s: of objects that
    the node reads and puts for them in a second."""

    dram_min: Bytes | None = None
    dram_max: Bytes | None = None
    ssd_max: Bytes | None = None
    pins_max: Bytes | None = None
    bytes_per_s: Bytes | None = None

    def given(self) -> dict[str, int]:
        """Those that there are, by the name of the column."""
        return {name: value for name in LIMITS if (value := getattr(self, name)) is not None}


class TenantRow(TenantLimits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One row, with the limits that it names. name: printable ASCII without white space, as node.tenants has
    it."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[\x21-\x7e]+\Z", max_length=255)]
    role: TenantRole
    keys: Annotated[tuple[Key, ...], msgspec.Meta(min_length=1, max_length=2)]
    salt: Annotated[str, msgspec.Meta(pattern=r"^[\x21-\x7e]*\Z", max_length=128)] = ""


class _File(msgspec.Struct, forbid_unknown_fields=True):
    tenants: list[dict[str, object]] = []


class TenantsFile:
    """The rows of a file that is followed."""

    def __init__(self, path: str) -> None:
        """Raises ConfigError, with the row at fault."""
        self.path = path
        self._seen = file_state(path)  # first: what changes while it is read is read again
        self.rows = read_tenants(path)

    def reread(self) -> None:
        """Reads the file where it is another one than before, into ``rows``. Raises ConfigError and leaves
        the rows as they are: once for a file with an error, and each time for one that cannot be read at
        the moment, as with too many open files. A file that is gone is no change."""
        seen = file_state(self.path)
        if not seen or seen == self._seen:
            return
        content = _content_of(self.path)
        try:
            self.rows = _rows_in(self.path, content)
        except ConfigError:
            self._seen = seen  # it has that error until it changes
            raise
        self._seen = seen


class _Content(NamedTuple):
    mode: int
    text: bytes


def read_tenants(path: str, *, may_have_none: bool = False) -> list[TenantRow]:
    """The rows of a file, at least one. Raises ConfigError with the number and name of the row at fault,
    never a key."""
    return _rows_in(path, _content_of(path), may_have_none=may_have_none)


def _content_of(path: str) -> _Content:
    try:
        with open(path, "rb") as file:
            return _Content(stat.S_IMODE(os.fstat(file.fileno()).st_mode), file.read())
    except OSError as error:
        raise _bad(f"the tenants cannot be read from {path}: {error.strerror}") from error


def _rows_in(path: str, content: _Content, *, may_have_none: bool = False) -> list[TenantRow]:
    if content.mode & 0o077:
        raise _bad(f"{path} can be read by others (mode {content.mode:04o}); run: chmod 600 {path}")
    try:
        table = msgspec.convert(tomllib.loads(content.text.decode()), _File)
    except UnicodeDecodeError as error:
        raise _bad(f"the tenants cannot be read from {path}: it is not UTF-8") from error
    # Besides its own errors tomllib has ValueError, for a number of thousands of digits, and RecursionError.
    except (ValueError, RecursionError) as error:
        raise _bad(
            f"{path} is no file of tenants, [[tenants]] with name, role and keys each: {error}"
        ) from error
    # One that is being written in place is empty at first: that would end the connections of all tenants.
    if not table.tenants and not may_have_none:
        raise _bad(f"{path} has no row [[tenants]]; it needs one, and is to be replaced whole, by a rename")
    rows = [_row(path, number, row) for number, row in enumerate(table.tenants, 1)]
    _check(path, rows)
    return rows


def salts_of(rows: Iterable[TenantRow]) -> dict[str, str]:
    """The salt of each tenant that has one."""
    return {row.name: row.salt for row in rows if row.salt}


def native_rows(rows: Iterable[TenantRow]) -> list[tuple[str, str, list[str]]]:
    """As the servers of the C++ core take them."""
    return [(row.name, row.role, list(row.keys)) for row in rows]


def limits_of(rows: Iterable[TenantRow]) -> dict[str, TenantLimits]:
    """The limits of each tenant that has some, from all of its rows."""
    merged: dict[str, dict[str, int]] = {}
    for row in rows:
        if given := row.given():
            merged.setdefault(row.name, {}).update(given)
    return {name: TenantLimits(**given) for name, given in merged.items()}


NativeLimits = tuple[str, int | None, int | None, int | None, int | None, int | None]


def native_limits(rows: Iterable[TenantRow]) -> list[NativeLimits]:
    """As the nodes of the C++ core take them: (tenant, dram_min, dram_max, ssd_max, pins_max,
    bytes_per_s)."""
    return [
        (name, each.dram_min, each.dram_max, each.ssd_max, each.pins_max, each.bytes_per_s)
        for name, each in limits_of(rows).items()
    ]


def tenants_text(rows: Iterable[TenantRow]) -> str:
    """A file with those rows."""
    lines = []
    for row in rows:
        keys = ", ".join(_quoted(key) for key in row.keys)
        lines += ["[[tenants]]", f"name = {_quoted(row.name)}", f"role = {_quoted(row.role)}"]
        lines += [f"keys = [{keys}]"] + ([f"salt = {_quoted(row.salt)}"] if row.salt else [])
        lines += [*(f"{column} = {size}" for column, size in row.given().items()), ""]
    return "\n".join(lines)


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _row(path: str, number: int, given: dict[str, object]) -> TenantRow:
    name = given.get("name")
    where = f"row {number} ({f'{name:.80}' if isinstance(name, str) else 'without a name'}) of {path}"
    sizes: dict[str, object] = {}
    for column in LIMITS:
        if isinstance(text := given.get(column), str):
            try:
                sizes[column] = parse_size(text)
            except ValueError as error:
                raise _bad(f"{where}: {column}: {error}") from error
    try:
        row = msgspec.convert(given | sizes, TenantRow)
    except msgspec.ValidationError as error:
        raise _bad(f"{where}: {error}") from error
    for key in row.keys:
        if len(key) < KEY_BYTES_MIN:
            raise _bad(
                f"row {number} ({row.name}) of {path} has a key of {len(key)} bytes: fewer than "
                f"{KEY_BYTES_MIN} can be guessed; make one with: openssl rand -hex 32"
            )
    if row.salt and len(row.salt) < KEY_BYTES_MIN:
        raise _bad(
            f"row {number} ({row.name}) of {path} has a salt of {len(row.salt)} bytes: fewer than "
            f"{KEY_BYTES_MIN} can be guessed; make one with: openssl rand -hex 32"
        )
    return row


def _check(path: str, rows: list[TenantRow]) -> None:
    keys: dict[str, int] = {}
    salts: dict[str, tuple[int, str]] = {}
    places: dict[tuple[str, str], int] = {}
    owners: dict[str, tuple[int, str]] = {}
    limits: dict[tuple[str, str], tuple[int, int]] = {}
    for number, row in enumerate(rows, 1):
        for key in row.keys:
            if key in keys:
                raise _bad(
                    f"rows {keys[key]} and {number} ({row.name}) of {path} have the same key; give each one"
                )
            keys[key] = number
        before = places.setdefault((row.name, row.role), number)
        if before != number:
            raise _bad(
                f"rows {before} and {number} of {path} are both the {row.role} of {row.name}; join them"
            )
        first, salt = salts.setdefault(row.name, (number, row.salt))
        if salt != row.salt:
            raise _bad(f"rows {first} and {number} of {path} have different salts; tenant {row.name} has one")
        for column, size in row.given().items():
            first, other = limits.setdefault((row.name, column), (number, size))
            if other != size:
                raise _bad(
                    f"rows {first} and {number} of {path} have different {column}; tenant {row.name} has one"
                )
        if row.salt:
            first, owner = owners.setdefault(row.salt, (number, row.name))
            if owner != row.name:
                raise _bad(
                    f"rows {first} and {number} of {path} are two tenants' with one salt; make another"
                )
    for tenant, each in limits_of(rows).items():
        low, most = each.dram_min, each.dram_max
        if most is not None and most < DRAM_MAX_MIN:
            raise _bad(f"dram_max of tenant {tenant} in {path} is under 2 MiB; give it more")
        if low is not None and most is not None and low > most:
            raise _bad(
                f"dram_min of tenant {tenant} in {path} is {format_size(low)}, more than its dram_max of "
                f"{format_size(most)}; lower it"
            )


def _bad(sentence: str) -> ConfigError:
    return ConfigError(f"{SETTING}: {sentence}", operation="config", key=SETTING)
