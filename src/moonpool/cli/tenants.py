"""`moonpool tenants`: the keys of tenants (``cluster.tenants_file``)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moonpool.cli.options import AsJson, ConfigFile, examples

if TYPE_CHECKING:
    from moonpool.core.config.tenants_file import TenantRow
    from moonpool.core.errors import ConfigError

File = Annotated[
    Path | None, typer.Option("--file", help="The file of tenants; default: cluster.tenants_file.")
]


def register(app: typer.Typer) -> None:
    """Adds the group ``tenants`` with its commands ``list`` and ``add``."""
    group = typer.Typer(
        help="Show the keys of tenants, or add one.",
        no_args_is_help=True,
        epilog=examples("moonpool tenants list", "moonpool tenants add search --role writer"),
    )
    group.command(name="list", epilog=examples("moonpool tenants list --file /etc/moonpool/tenants.toml"))(
        list_rows
    )
    group.command(epilog=examples("moonpool tenants add search --role writer --key-file search.key"))(add)
    app.add_typer(group, name="tenants")


def list_rows(file: File = None, config: ConfigFile = None, as_json: AsJson = False) -> None:
    """Print the rows of the file, without their secrets."""
    import json

    from moonpool.core.config.tenants_file import read_tenants
    from moonpool.core.config.units import format_size

    rows = read_tenants(str(_file(file, config)))
    if as_json:
        shown = [
            {
                "name": each.name,
                "role": each.role,
                "keys": len(each.keys),
                "salt": bool(each.salt),
                "limits": each.given(),
            }
            for each in rows
        ]
        print(json.dumps(shown, indent=2))
        return
    width = max((len(each.name) for each in rows), default=0)
    for each in rows:
        keys = "1 key" if len(each.keys) == 1 else f"{len(each.keys)} keys"
        limits = "".join(f"  {column} {format_size(size)}" for column, size in each.given().items())
        print(f"{each.name:{width}}  {each.role:6}  {keys:6}  {'salt' if each.salt else 'no salt'}{limits}")


def add(
    name: Annotated[str, typer.Argument(help="The tenant.")],
    role: Annotated[str, typer.Option("--role", help="reader, writer or admin.")],
    key_file: Annotated[
        Path | None,
        typer.Option("--key-file", help="A new file for the key; default: NAME-ROLE.key."),
    ] = None,
    no_salt: Annotated[
        bool,
        typer.Option("--no-salt", help="For a tenant that has objects already, which were put without one."),
    ] = False,
    dram_min: Annotated[
        str | None, typer.Option("--dram-min", help="Memory of each node that is the tenant's own.")
    ] = None,
    dram_max: Annotated[
        str | None, typer.Option("--dram-max", help="The most memory that it has of each node.")
    ] = None,
    ssd_max: Annotated[
        str | None, typer.Option("--ssd-max", help="The most that it has of each node's SSDs.")
    ] = None,
    pins_max: Annotated[
        str | None, typer.Option("--pins-max", help="The most that its clients pin at each node.")
    ] = None,
    bytes_per_s: Annotated[
        str | None,
        typer.Option("--bytes-per-s", help="The most that each node reads and puts for them in a second."),
    ] = None,
    file: File = None,
    config: ConfigFile = None,
) -> None:
    """Add a row with a random key, and with a salt where it is the tenant's first; write the key to a file of
    mode 0600, for the tenant's clients. Nodes and masters read the file again by themselves.
    """
    import os

    from moonpool.core.config.tenants_file import ROLES

    tenants = Path(os.path.realpath(_file(file, config)))  # a link stays one
    key_file = key_file or Path(f"{name}-{role}.key")
    if role not in ROLES:
        raise _wrong(f"--role is {role!r}; it is one of {', '.join(ROLES)}")
    limits = _limits(
        dram_min=dram_min,
        dram_max=dram_max,
        ssd_max=ssd_max,
        pins_max=pins_max,
        bytes_per_s=bytes_per_s,
    )
    with _alone_in(tenants.parent):
        _add(tenants, name, role, key_file, limits, no_salt=no_salt)
    print(f"added the {role} of {name} to {tenants}; its clients need {key_file} (cluster.tenant_key_file)")


def _add(
    tenants: Path, name: str, role: str, key_file: Path, limits: dict[str, int], *, no_salt: bool
) -> None:
    import secrets

    from moonpool.core.config.paths import write_private
    from moonpool.core.config.tenants_file import read_tenants, tenants_text

    if key_file.exists():
        raise _wrong(f"{key_file} is there already; give another with --key-file")
    rows = read_tenants(str(tenants), may_have_none=True) if tenants.exists() else []
    if any((each.name, each.role) == (name, role) for each in rows):
        raise _wrong(
            f"{tenants} has the {role} of {name} already; to replace its key, write a second one in its keys"
        )
    known = [each.salt for each in rows if each.name == name]
    salt = known[0] if known else "" if no_salt else secrets.token_hex(16)
    row = _row(name, role, secrets.token_hex(32), salt, limits)
    # What stands in the file stays as it is, with its comments.
    before = tenants.read_bytes().rstrip(b"\n") + b"\n\n" if tenants.exists() else b""
    draft = tenants.with_name(f".{tenants.name}-{secrets.token_hex(4)}")
    write_private(draft, before + tenants_text([row]).encode())
    try:
        read_tenants(str(draft))
        if tenants.exists():
            _give_owner_and_mode(draft, tenants)
        write_private(key_file, row.keys[0].encode() + b"\n")
        draft.replace(tenants)
    finally:
        draft.unlink(missing_ok=True)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Of two commands that add rows one waits: it would write the file without the row of the other."""
    import fcntl
    import os

    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise _wrong(f"{folder} cannot be read: {error.strerror}") from error
    try:
        with suppress(OSError):  # some file systems of a network lock no folders
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _give_owner_and_mode(draft: Path, tenants: Path) -> None:
    """Those of the file, which the node's user can read, also where root adds a row."""
    import os
    import stat

    own, wanted = draft.stat(), tenants.stat()
    try:
        if own.st_uid != wanted.st_uid:
            os.chown(draft, wanted.st_uid, -1)
    except OSError as error:
        raise _wrong(
            f"{tenants} belongs to the user {wanted.st_uid}, as whom this command must run, or as root"
        ) from error
    if own.st_gid != wanted.st_gid:
        with suppress(PermissionError):  # its mode gives the group nothing
            os.chown(draft, -1, wanted.st_gid)
    os.chmod(draft, stat.S_IMODE(wanted.st_mode))


def _limits(**given: str | None) -> dict[str, int]:
    from moonpool.core.config.units import parse_size

    limits = {}
    for column, text in given.items():
        try:
            if text is not None:
                limits[column] = parse_size(text)
        except ValueError as error:
            raise _wrong(f"--{column.replace('_', '-')}: {error}") from error
    return limits


def _row(name: str, role: str, key: str, salt: str, limits: dict[str, int]) -> TenantRow:
    import msgspec

    from moonpool.core.config.tenants_file import TenantRow

    try:
        row = {"name": name, "role": role, "keys": [key], "salt": salt, **limits}
        return msgspec.convert(row, TenantRow)
    except msgspec.ValidationError as error:
        raise _wrong(f"{name!r} is no name of a tenant: {error}") from error


def _file(given: Path | None, config: Path | None) -> Path:
    from moonpool.core.config.config import load

    file = given or load(config).cluster.tenants_file
    if not file:
        raise _wrong("there is no file of tenants; set cluster.tenants_file, or give --file")
    return Path(file)


def _wrong(sentence: str) -> ConfigError:
    from moonpool.core.errors import ConfigError

    return ConfigError(f"tenants: {sentence}", operation="config", key="cluster.tenants_file")
