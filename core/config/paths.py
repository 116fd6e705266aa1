"""Where the processes of one user on one host meet: the runtime folder, its sockets and its token.

    RUNTIME/                   0700, ours; see runtime_dir()
      token                    0600, the cluster token when none is configured; the first process makes it
      admin-token              0600, the same for admin actions
      node-NAME.sock           the Unix socket of node NAME
      node-NAME.sock.token     0600, that node's token, where it was configured: its clients need no setting
      node-NAME.sock.tls       0600, how they dial that node's master, where it speaks TLS
      node-NAME.sock.events    0600, where that node publishes its KV events, and which master it joins
      node-NAME.sock.pub       where it publishes them for this user's processes (node.events = "auto"); and
                               again, what some missed: node-NAME.sock.replay
      node.sock                a link to the socket of the first node; what a client without an address takes
      up.json, logs/, up.log   the state and the logs of `moonpool up`; what `moonpool up -d` itself says
      events-NAME.sock         where an engine of `moonpool up` publishes its KV events; and again, what some
                               missed: events-NAME-replay.sock

The folder and the token are checked each time they are used: a folder that another user made would hand them
our traffic, and a token that others can read is no secret.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from moonpool.core.config.cluster_token import ClusterToken, check_token, read_token
from moonpool.core.errors import ConfigError

RUNTIME_DIR_VARIABLE = "MOONPOOL_RUNTIME_DIR"
CACHE_VARIABLE = "MOONPOOL_CACHE"
TOKEN_VARIABLE = "MOONPOOL_CLUSTER_TOKEN"
TOKEN_FILE_VARIABLE = "MOONPOOL_CLUSTER_TOKEN_FILE"
TENANT_KEY_FILE_VARIABLE = "MOONPOOL_CLUSTER_TENANT_KEY_FILE"

SOCKET_PATH_BYTES_MAX = 107  # sockaddr_un.sun_path holds 108 with its final NUL

_NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def runtime_dir(*, ensure: bool = False) -> Path:
    """The folder where this user's processes on this host meet.

    ``MOONPOOL_RUNTIME_DIR``, else /run/moonpool for root, else $XDG_RUNTIME_DIR/moonpool, else
    /tmp/moonpool-UID. ensure: create it (0700) when it is not there. Without it a missing folder is no error.
    Raises ConfigError when what is there is not a folder, belongs to another user, or is open to others.
    """
    path = _runtime_path()
    if ensure:
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"cannot create the runtime folder {path}: {error.strerror}; "
                f"set {RUNTIME_DIR_VARIABLE} to a folder of yours",
                operation="runtime_dir",
                peer=str(path),
                cause=error,
            ) from error
    _check_private(path)
    return path


def cache_dir() -> Path:
    """Where this user keeps what can be made again: ``MOONPOOL_CACHE``, else $XDG_CACHE_HOME/moonpool, else
    ~/.cache/moonpool. It need not exist."""
    override = os.environ.get(CACHE_VARIABLE)
    if override:
        return Path(override).absolute()
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(xdg) if os.path.isabs(xdg) else Path(os.path.expanduser("~/.cache"))) / "moonpool"


def node_socket(name: str) -> Path:
    """The Unix socket of the node called ``name``. Raises ConfigError for a name that makes no file name."""
    return check_socket_path(runtime_dir() / f"node-{check_node_name(name)}.sock")


def check_node_name(name: str) -> str:
    """Returns ``name``, or raises ConfigError when it makes no file name; lists of nodes print it."""
    if _NODE_NAME.fullmatch(name) is None:
        raise ConfigError(
            f"node name {name!r} must be 1 to 64 letters, digits, dots, dashes or underscores, and "
            f"start with a letter or digit",
            operation="node_socket",
            key="node.name",
        )
    return name


def default_node_socket() -> Path:
    """What a client without an address connects to: a link that the first node makes."""
    return runtime_dir() / "node.sock"


def socket_token(socket: Path) -> Path:
    """The file beside a node's socket that tells this user's processes a token that was configured."""
    return Path(f"{socket}.token")


def socket_tls(socket: Path) -> Path:
    """The file beside a node's socket that tells how to dial its master inside TLS."""
    return Path(f"{socket}.tls")


def socket_events(socket: Path) -> Path:
    """The file beside a node's socket that tells where the node publishes its KV events."""
    return Path(f"{socket}.events")


def socket_event_streams(socket: Path) -> tuple[Path, Path]:
    """The Unix sockets beside a node's own at which it publishes its KV events, and replays them."""
    return Path(f"{socket}.pub"), Path(f"{socket}.replay")


def socket_take_over(socket: Path) -> Path:
    """The Unix socket beside a node's own at which another process takes over from it."""
    return Path(f"{socket}.take")


def client_token(socket: str | Path) -> bytes:
    """What to prove to ``socket``, a node's socket or the link to one: the tenant's key or else the token of
    the environment, else what the node wrote beside it, else the one that all of this user share here.
    """
    if key_file := os.environ.get(TENANT_KEY_FILE_VARIABLE):
        return read_token(Path(key_file), name="tenant-key")
    beside = socket_token(Path(os.path.realpath(socket)))
    if not {TOKEN_VARIABLE, TOKEN_FILE_VARIABLE} & os.environ.keys() and os.path.exists(beside):
        return read_token(beside)
    return read_or_create_token()


def write_private(path: Path, content: bytes) -> None:
    """Makes or replaces the file ``path``, whole or not at all, readable for us alone."""
    draft = path.with_name(f".{path.name}-{os.getpid()}")
    with writing(path):
        try:
            draft.unlink(missing_ok=True)
            with open(
                os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb"
            ) as file:
                file.write(content)
            draft.replace(path)
        except OSError:
            with suppress(OSError):
                draft.unlink(missing_ok=True)
            raise


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Inside, what the runtime folder's disk refuses becomes a ConfigError: full, read-only, not ours."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}; make room there, or set {RUNTIME_DIR_VARIABLE} to a "
            f"folder that can be written",
            operation="runtime_dir",
            key=RUNTIME_DIR_VARIABLE,
            peer=str(path),
            cause=error,
        ) from error


def check_socket_path(path: Path) -> Path:
    """Returns ``path``, or raises ConfigError when it is too long for a Unix socket."""
    size = len(os.fsencode(path))
    if size > SOCKET_PATH_BYTES_MAX:
        raise ConfigError(
            f"socket path {path} has {size} bytes and a Unix socket takes {SOCKET_PATH_BYTES_MAX}; "
            f"set {RUNTIME_DIR_VARIABLE} to a shorter folder",
            operation="socket",
            key="node.socket",
            peer=str(path),
            bytes=size,
        )
    return path


def read_or_create_token(
    token_file: str | Path | None = None, *, env: Mapping[str, str] | None = None, name: str = "token"
) -> bytes:
    """The cluster token: ``token_file``, else the environment, else RUNTIME/``name``, made by the
    first process that calls this.

    Returns the token's bytes (surrounding white space removed), 1 to 4,096 of them. Raises ConfigError for a
    file that is missing, empty, too long, or that others can read, and for two settings that contradict each
    other.
    """
    env = os.environ if env is None else env
    if token_file:
        return read_token(Path(token_file), name=name)
    if TOKEN_VARIABLE in env and TOKEN_FILE_VARIABLE in env:
        raise ConfigError(
            f"both {TOKEN_VARIABLE} and {TOKEN_FILE_VARIABLE} are set; unset one of them",
            operation="token",
            key=TOKEN_VARIABLE,
        )
    if TOKEN_VARIABLE in env:
        return check_token(env[TOKEN_VARIABLE].encode(), f"the variable {TOKEN_VARIABLE}")
    if TOKEN_FILE_VARIABLE in env:
        return read_token(Path(env[TOKEN_FILE_VARIABLE]))
    path = runtime_dir(ensure=True) / name
    return read_token(path, name=name) if path.exists() else _create_token(path)


def _create_token(path: Path) -> ClusterToken:
    """Makes the token file whole or not at all: written beside it, then linked to its name, where the first
    wins.
    """
    draft = path.with_name(f".token-{os.getpid()}-{secrets.token_hex(4)}")
    with writing(path):
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with open(descriptor, "wb") as file:
                file.write(secrets.token_hex(32).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
            with suppress(FileExistsError):
                os.link(draft, path)
        finally:
            draft.unlink()
    return read_token(path)


def _runtime_path() -> Path:
    override = os.environ.get(RUNTIME_DIR_VARIABLE)
    if override:
        return Path(override).absolute()
    if os.geteuid() == 0:
        return Path("/run/moonpool")
    xdg = os.environ.get("XDG_RUNTIME_DIR")
    if xdg:
        return Path(xdg) / "moonpool"
    return Path(f"/tmp/moonpool-{os.geteuid()}")


def _check_private(path: Path) -> None:
    try:
        info = path.stat() if os.environ.get(RUNTIME_DIR_VARIABLE) else path.lstat()
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(
            f"cannot look at the runtime folder {path}: {error.strerror}",
            operation="runtime_dir",
            peer=str(path),
            cause=error,
        ) from error
    if not stat.S_ISDIR(info.st_mode):
        problem = "is not a folder; remove it"
    elif info.st_uid != os.geteuid():
        problem = f"belongs to user {info.st_uid}, not to you ({os.geteuid()}); run this as that user"
    elif stat.S_IMODE(info.st_mode) & 0o077:
        problem = f"is open to others (mode {stat.S_IMODE(info.st_mode):04o}); run: chmod 700 {path}"
    else:
        return
    raise ConfigError(
        f"the runtime folder {path} {problem}, or set {RUNTIME_DIR_VARIABLE} to a folder of yours",
        operation="runtime_dir",
        peer=str(path),
    )
