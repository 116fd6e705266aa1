"""A node's name on its host: the socket that it alone may serve, and the link that others find it by.

    node-NAME.sock.token  the cluster token where one was configured, for clients; gone with the socket
    node-NAME.sock.tls    how clients dial the master inside TLS, where they must; gone with the socket
    node-NAME.sock.events where the node publishes its KV events (published_events.py); gone with the socket
    node-NAME.sock.pub    where it publishes them by default, and node-NAME.sock.replay; gone with the socket
    node-NAME.sock.take   where another process takes over from the node (take_over.py); gone with the socket
    node-NAME.sock        bound by the server; after kill -9 it stays behind and refuses connections: stale
    node-NAME.sock.lock   locked (flock) by the living owner of node-NAME.sock: of two nodes that start at the
                          same moment only one finds the socket stale; the kernel frees it with the process
    node.sock             leads to the first node's socket; when that one leaves, to another living node's; a
                          stale one is replaced

Everything here is a handful of system calls in the runtime folder, once at the start and once at the end.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from moonpool.core.config import paths
from moonpool.core.config.cluster_token import ClusterToken, secrets_of
from moonpool.core.errors import ConfigError

CONNECT_TIMEOUT_S = 1.0
LOCK_TIMEOUT_S = 5.0  # each process holds the lock for a few system calls
LOCK_RETRY_S = 0.02
FOLLOW_S = 1.0  # between two looks at a token file


def is_served(path: Path) -> bool:
    """Whether a process accepts connections on the Unix socket ``path``, or may: only a clear refusal counts
    as no.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(CONNECT_TIMEOUT_S)
        try:
            probe.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except OSError:
            return True
    return True


class Claim:
    """The sole right to serve one socket path, from construction to release(). Removes a stale socket file.

    Raises ConfigError when a living process serves the path, or when something else stands there.
    """

    def __init__(self, path: Path) -> None:
        self._begin(path)
        try:
            self._descriptor = _take(self._lock)
        except BlockingIOError:
            raise _served(path) from None
        except OSError as error:
            raise ConfigError(
                f"cannot make the socket {path}: {error.strerror}; choose another with --socket",
                operation="node",
                key="node.socket",
                peer=str(path),
                cause=error,
            ) from error
        try:
            self._remove_stale_socket()
            self._remove_told()
        except BaseException:
            self._drop_lock()
            raise

    def _begin(self, path: Path) -> None:
        self.path = path
        self._lock = Path(f"{path}.lock")
        self._told: dict[Path, bytes] = {}
        self._released = threading.Event()
        self._follower: threading.Thread | None = None

    @classmethod
    def of_predecessor(cls, path: Path, lock: int) -> Claim:
        """The right that the process before had. lock: its descriptor of the locked file, which is this one's
        from now on, and so is the lock, however that process ends."""
        claim = cls.__new__(cls)
        claim._begin(path)
        claim._descriptor = lock
        return claim

    @property
    def lock(self) -> int:
        """The descriptor of the locked file, for a successor."""
        return self._descriptor

    def abandon(self) -> None:
        """Leaves everything as it is: another process has the right."""
        self._released.set()
        if self._follower is not None:
            self._follower.join()
        os.close(self._descriptor)

    def release(self) -> None:
        """Removes the socket and gives the right back."""
        self._released.set()
        if self._follower is not None:
            self._follower.join()
        self.path.unlink(missing_ok=True)
        self._remove_told()
        self._drop_lock()

    def tell_token(self, token: bytes) -> None:
        """Writes the node's token for this user's processes, and anew where it changes, until release()."""
        told = secrets_of(token)
        self._write_token(told)

        def follow() -> None:
            nonlocal told
            while not self._released.wait(FOLLOW_S):
                if (now := secrets_of(token)) != told:
                    with suppress(ConfigError):  # a full disk: tried again
                        self._write_token(now)
                        told = now

        if isinstance(token, ClusterToken):
            self._follower = threading.Thread(target=follow, name="node-token", daemon=True)
            self._follower.start()

    def _write_token(self, secrets: tuple[bytes, ...]) -> None:
        self._tell(paths.socket_token(self.path), b"\n".join(secrets))

    def tell_tls(self, settings: bytes) -> None:
        """Writes how clients connect to the node's master."""
        self._tell(paths.socket_tls(self.path), settings)

    def tell_events(self, published: bytes) -> None:
        """Writes where the node publishes its KV events."""
        self._tell(paths.socket_events(self.path), published)

    def _tell(self, path: Path, content: bytes) -> None:
        paths.write_private(path, content + b"\n")
        self._told[path] = content

    def tell_again(self) -> None:
        """All that was told, and nothing else, as another process may have told of itself meanwhile."""
        for told in (paths.socket_token, paths.socket_tls, paths.socket_events):
            path = told(self.path)
            if path in self._told:
                self._tell(path, self._told[path])
            else:
                path.unlink(missing_ok=True)

    def _remove_told(self) -> None:
        for told in (paths.socket_token, paths.socket_tls, paths.socket_events):
            told(self.path).unlink(missing_ok=True)
        # ZMQ leaves them behind.
        for stream in (*paths.socket_event_streams(self.path), paths.socket_take_over(self.path)):
            with suppress(FileNotFoundError):
                if stat.S_ISSOCK(stream.lstat().st_mode):  # anything else is another program's
                    stream.unlink()

    def _remove_stale_socket(self) -> None:
        try:
            mode = self.path.lstat().st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(mode):
            raise ConfigError(
                f"{self.path} is there and is no socket; remove it or choose another with --socket",
                operation="node",
                key="node.socket",
                peer=str(self.path),
            )
        if is_served(self.path):
            raise _served(self.path)
        self.path.unlink(missing_ok=True)

    def _drop_lock(self) -> None:
        self._lock.unlink(missing_ok=True)
        os.close(self._descriptor)


def link_default(target: Path) -> bool:
    """Makes node.sock lead to ``target`` unless it leads to a living node. Returns whether it leads to
    ``target``.
    """
    link = paths.default_node_socket()
    if link == target:
        return False
    with _default_link_locked():
        if link.is_symlink() and _target(link) == target:
            return True
        if is_served(link):
            return False
        _point(link, target)
        return True


def hand_over_default(target: Path) -> None:
    """Where node.sock leads to ``target``, whose node leaves: to another living node of the runtime folder,
    the oldest first, so that clients without an address go on; without one it is removed.
    """
    link = paths.default_node_socket()
    if not link.is_symlink():
        return
    with _default_link_locked():
        if not link.is_symlink() or _target(link) != target:
            return
        for other in _sockets_by_age(link.parent):
            if other != target and is_served(other):
                _point(link, other)
                return
        link.unlink()


def _sockets_by_age(folder: Path) -> list[Path]:
    found = []
    for path in folder.glob("node-*.sock"):
        with suppress(FileNotFoundError):
            found.append((path.stat().st_mtime_ns, path))
    return [path for _, path in sorted(found)]


def _point(link: Path, target: Path) -> None:
    draft = link.with_name(f".node.sock-{os.getpid()}")
    with paths.writing(link):
        draft.unlink(missing_ok=True)
        draft.symlink_to(target.name if target.parent == link.parent else target)
        draft.replace(link)


def _target(link: Path) -> Path:
    return link.parent / link.readlink()


@contextmanager
def _default_link_locked() -> Iterator[None]:
    path = paths.runtime_dir() / "node.sock.lock"
    with paths.writing(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _lock_in_time(descriptor, path)
        yield
    finally:
        os.close(descriptor)


def _lock_in_time(descriptor: int, path: Path) -> None:
    give_up_s = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        if time.monotonic() > give_up_s:
            raise ConfigError(
                f"another process has held {path} for over {LOCK_TIMEOUT_S:g} s; end it, it may be stopped",
                operation="node",
                peer=str(path),
            )
        time.sleep(LOCK_RETRY_S)


def _take(lock: Path) -> int:
    """Locks the file ``lock`` and returns its descriptor. Raises BlockingIOError when another process holds
    it.
    """
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _same_file(descriptor, lock):  # otherwise its last owner removed it after the open
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _served(path: Path) -> ConfigError:
    return ConfigError(
        f"another node already serves {path}; choose --name, or replace it with --take-over",
        operation="node",
        key="node.name",
        peer=str(path),
        cause=OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE)),
    )
