"""`moonpool put`, `get`, `ls`, `rm` and `stat`: the pool by hand, on moonpool.Store."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moonpool.cli.options import AsJson, ConfigFile, Namespace, NodeSocket, Tenant, TokenFile, examples
from moonpool.core.errors import InvalidArgument
from moonpool.core.service.exit_codes import EXIT_MISS

if TYPE_CHECKING:
    from moonpool.core.store.store import Store


Key = Annotated[str, typer.Argument(help="The object's name.")]


def register(app: typer.Typer) -> None:
    """Adds ``put``, ``get``, ``ls``, ``rm`` and ``stat``, without a group."""
    app.command(epilog=examples("moonpool put greeting hello.txt", "echo hello | moonpool put greeting -"))(
        put
    )
    app.command(epilog=examples("moonpool get greeting", "moonpool get greeting -o hello.txt"))(get)
    app.command(
        epilog=examples("moonpool ls", "moonpool ls user/ --limit 20", "moonpool ls --pattern '*.txt' --json")
    )(ls)
    app.command(
        epilog=examples(
            "moonpool rm greeting",
            "moonpool rm first second",
            "moonpool rm --pattern 'user/*'",
            "moonpool rm --all --namespace scratch",
        )
    )(rm)
    app.command(
        epilog=examples("moonpool stat", "moonpool stat greeting", "moonpool stat --json --node second")
    )(stat)


def put(
    key: Key,
    file: Annotated[str, typer.Argument(metavar="FILE|-", help="What to store; - is standard input.")],
    replace: Annotated[bool, typer.Option("--replace", help="Replace an object that is there.")] = False,
    node: NodeSocket = None,
    tenant: Tenant = "default",
    namespace: Namespace = "default",
    config: ConfigFile = None,
    token_file: TokenFile = None,
) -> int:
    """Store a file under a key. Exit code 1 when it was not stored: the key is there, the arena is full."""
    from moonpool.core.store.types import EXISTS, STORED

    data = _read(file)
    with _open(node, tenant, namespace, config, token_file) as store:
        result = store.put(key, data, replace=replace)
    if result == STORED:
        return 0
    if result == EXISTS:
        print(f"moonpool put: {key} is there already, and stays; --replace replaces it", file=sys.stderr)
    else:
        print(f"moonpool put: {key} was refused: {result.reason}", file=sys.stderr)
    return EXIT_MISS


def get(
    key: Key,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write there.")
    ] = None,
    node: NodeSocket = None,
    tenant: Tenant = "default",
    namespace: Namespace = "default",
    config: ConfigFile = None,
    token_file: TokenFile = None,
) -> int:
    """Write an object to standard output or a file. Exit code 1 when there is none."""
    with _open(node, tenant, namespace, config, token_file) as store:
        view = store.get(key)
        if view is None:
            print(f"moonpool get: there is no object {key}", file=sys.stderr)
            return EXIT_MISS
        if output is None:
            sys.stdout.buffer.write(view)
            sys.stdout.buffer.flush()
        else:
            _write(output, view)
    return 0


def ls(
    prefix: Annotated[str, typer.Argument(help="Only names that start with it.")] = "",
    pattern: Annotated[
        str | None, typer.Option(help=r"Only names that match as a whole: *, ?, \[abc].")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 1000,
    as_json: AsJson = False,
    node: NodeSocket = None,
    tenant: Tenant = "default",
    namespace: Namespace = "default",
    config: ConfigFile = None,
    token_file: TokenFile = None,
) -> None:
    """List the objects of the pool: size and name. A name that is no text is shown as b'...'."""
    with _open(node, tenant, namespace, config, token_file) as store:
        entries = store.list(prefix, pattern=pattern, limit=limit)
    if as_json:
        import msgspec

        print(
            msgspec.json.encode(
                [{"key": _shown(entry.key), "bytes": entry.size} for entry in entries]
            ).decode()
        )
        return
    for entry in entries:
        print(f"{entry.size:>12}  {_shown(entry.key)}")


def rm(
    keys: Annotated[list[str] | None, typer.Argument(help="The objects' names.")] = None,
    prefix: Annotated[str | None, typer.Option(help="Instead: all whose names start with it.")] = None,
    pattern: Annotated[
        str | None, typer.Option(help=r"Instead: all whose names match: *, ?, \[abc].")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Instead: every object of the namespace, without a question.")
    ] = False,
    node: NodeSocket = None,
    tenant: Tenant = "default",
    namespace: Namespace = "default",
    config: ConfigFile = None,
    token_file: TokenFile = None,
) -> int:
    """Remove objects, wherever in the pool they are. Exit code 1 when one was not there.

    An empty --prefix, as of a variable that is not set, names every object: at a terminal it is asked about,
    in a script it is refused.
    """
    if sum(choice is not None for choice in (keys, prefix, pattern, everything or None)) != 1:
        raise InvalidArgument("give the names, or --prefix, or --pattern, or --all", operation="rm")
    if prefix == "":
        _confirm_everything(tenant, namespace)
    with _open(node, tenant, namespace, config, token_file) as store:
        if keys is None:
            count = store.remove_all(prefix or "", pattern=pattern)
            print(f"removed {count} objects")
            return 0 if count else EXIT_MISS
        removed = store.remove(keys)
    for key, done in zip(keys, removed, strict=True):
        if not done:
            print(f"moonpool rm: there is no object {key}", file=sys.stderr)
    return 0 if all(removed) else EXIT_MISS


def _confirm_everything(tenant: str, namespace: str) -> None:
    """Asks the operator at a terminal. Raises InvalidArgument where there is none, typer.Abort on a no."""
    if not sys.stdin.isatty():
        raise InvalidArgument(
            "--prefix is empty, so it names every object of the namespace; give --all if that is meant",
            operation="rm",
            key="prefix",
        )
    typer.confirm(f"Remove every object of tenant {tenant!r}, namespace {namespace!r}?", abort=True)


def stat(
    key: Annotated[
        str | None, typer.Argument(help="An object: its size and where its copies lie; default: the node.")
    ] = None,
    as_json: AsJson = False,
    node: NodeSocket = None,
    tenant: Tenant = "default",
    namespace: Namespace = "default",
    config: ConfigFile = None,
    token_file: TokenFile = None,
) -> int:
    """Show what a node counts, over its socket (no HTTP needed), or what an object is. Exit code 1 when there
    is no such object."""
    import msgspec

    with _open(node, tenant, namespace, config, token_file) as store:
        if key is None:
            values = store.stat()
        elif (found := store.stat(key)) is not None:
            values = msgspec.to_builtins(found)
        else:
            print(f"moonpool stat: there is no object {key}", file=sys.stderr)
            return EXIT_MISS
    if as_json:
        print(msgspec.json.encode(values).decode())
        return 0
    width = max(map(len, values), default=0)
    for name, value in values.items():
        print(f"{name:{width}}  {value}")
    return 0


def _open(
    node: str | None, tenant: str, namespace: str, config: Path | None, token_file: Path | None
) -> Store:
    from moonpool.core.config import paths
    from moonpool.core.config.config import load
    from moonpool.core.service.data_tls import pool_tls_for
    from moonpool.core.store.store import Store

    settings = load(config, arguments={"cluster.token_file": None if token_file is None else str(token_file)})
    if node is not None and "/" not in node:
        node = str(paths.node_socket(node))
    token, tls = settings.client_token(node or ""), pool_tls_for(settings, node or "")
    return Store(node, tenant=tenant, namespace=namespace, token=token, tls=tls)


def _read(file: str) -> bytes:
    if file == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise typer.BadParameter(f"cannot read {file}: {error.strerror}") from error


def _write(output: Path, data: memoryview) -> None:
    try:
        output.write_bytes(data)
    except OSError as error:
        raise typer.BadParameter(f"cannot write {output}: {error.strerror}") from error


def _shown(name: bytes) -> str:
    try:
        text = name.decode()
    except UnicodeDecodeError:
        return repr(name)
    return text if text.isprintable() else repr(name)
