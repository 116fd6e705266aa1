"""A new node process replaces the running one of its socket, with its memory and its connections.

    new                                         old: Offer, at node-NAME.sock.take
      connects                                  checks the user, and says what it is (Facts)
      checks Facts against its own settings
      "give"                                    stops serving; the description and all descriptors
      makes its server of them
      does all that can fail; "taken"           closes its KV events; "go"
      publishes its KV events; "serves"
      serves, joins its master                  keeps its connection to the master meanwhile
      closes the connection                     ends

Until "serves" nothing has changed: where the new process ends, refuses or is silent for too long (TAKE_S,
SERVE_S), the old one says "kept" and serves on. "serves" comes right before the new process serves, so that
of the two never both do. A new process whose connection ends without "kept" looks whether the old one still
answers: if so, that one serves on; if not, it was killed, and the new one serves.

Each message is one packet of a SOCK_SEQPACKET socket, with at most DESCRIPTORS_MAX descriptors.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from moonpool.core.config import paths
from moonpool.core.errors import ConfigError, Error, ProtocolError, Unavailable
from moonpool.core.service.peer_user import is_same_user
from moonpool.core.version_range import VersionRange

VERSIONS = VersionRange(1, 1)  # of messages and description, that this release speaks
WHAT = "the take-over"
DESCRIPTORS_MAX = 200  # in one packet; the kernel's limit is 253
PACKET_BYTES_MAX = 64 << 10
ANSWER_S = 5.0  # for the first words
GIVE_S = 90.0  # for the description: some seconds where there are millions of objects
TAKE_S = 10.0  # for the new process, from the description to "taken"; clients wait meanwhile
SERVE_S = 10.0  # for the new process, from "go" to "serves"
TAKE_BYTES_PER_S = 8 << 20  # of the description, for which it gets more time
GO_S = 60.0  # for the running node to close its KV events
JOIN_S = 5.0  # for the new process to join its master
LOOK_S = 2.0  # whether the old process still answers
LOOK_PAUSE_S = 0.01
GIVE, TAKEN, GO, SERVES, KEPT = b"give", b"taken", b"go", b"serves", b"kept"
WORD_BYTES_MAX = 16

_log = logging.getLogger("moonpool.node")


def give_word(version: int) -> bytes:
    """By which a new process asks for the node. Without a number behind it, as of a release before ranges, it
    means version 1."""
    return GIVE if version == 1 else GIVE + b" %d" % version


def given_version(word: bytes) -> int | None:
    """The version that give_word() says; None: it says none."""
    if word == GIVE:
        return 1
    what, _, number = word.partition(b" ")
    return int(number) if what == GIVE and number.isdigit() else None


class Facts(msgspec.Struct, frozen=True):
    """What the running node says of itself. version, highest: the lowest and the highest version that it
    speaks, of which the new process takes the highest in common; highest 0: of a release before ranges, which
    speaks ``version`` alone. settings: by their names, those that both processes must have alike;
    dram: of them, node.dram in bytes; refused: why it cannot be taken over now, else empty.
    http_sockets: descriptors of its pages. learned: of each range of masters, with commas, those that it has
    learned; empty: none, or of the release before, which does not say."""

    version: int
    pid: int
    settings: dict[str, str]
    advertise: str
    refused: str = ""
    http_sockets: int = 0
    dram: int = 0
    highest: int = 0
    learned: list[str] = []

    @property
    def versions(self) -> VersionRange:
        """That the running node speaks."""
        return VersionRange(self.version, self.highest or self.version)


class Predecessor:
    """The running node, which still serves: ``take_what_it_has``, ``agree``, ``replace``; or ``close``."""

    def __init__(self, connection: socket.socket, path: Path, facts: Facts, descriptors: list[int]) -> None:
        self._connection = connection
        self._path = path
        self.facts = facts
        self._was_killed = False
        self.lock, *http = descriptors
        self.http = [socket.socket(fileno=number) for number in http]

    def check(self, settings: Mapping[str, object]) -> None:
        """Raises ConfigError where it cannot be taken over with these settings."""
        if self.facts.refused:
            raise _refusal(f"the running node cannot be taken over: {self.facts.refused}")
        for name, own in settings.items():
            other = self.facts.settings.get(name)
            if other != own:
                raise _refusal(
                    f"the running node has {name} = {_text(other)}, and this one {_text(own)}: give it the "
                    f"same, or stop the running node, whose content is lost then",
                    name,
                )

    def take_what_it_has(self) -> tuple[int, list[int]]:
        """(descriptor of its description, further descriptors), which the caller owns. It serves no more from
        now on, until close()."""
        self._connection.settimeout(GIVE_S)
        self._send(give_word(VERSIONS.common(self.facts.versions) or VERSIONS.lowest))
        packet, numbers = self._receive()
        try:
            count = int(packet)
        except ValueError:
            _close_all(numbers)
            raise _refusal(packet.decode(errors="replace")) from None
        while len(numbers) < count:
            packet, more = self._receive()
            if not more:
                _close_all(numbers)
                raise ProtocolError("the running node sent fewer descriptors than it has", operation="node")
            numbers += more
        return numbers[0], numbers[1:]

    def agree(self) -> None:
        """What can fail has been done: the running node closes its KV events. Raises Unavailable where it
        serves on."""
        self._connection.settimeout(GO_S)
        try:
            self._connection.sendall(TAKEN)
            word = self._connection.recv(WORD_BYTES_MAX)
        except ConnectionError:
            word = self._last_word()
        except TimeoutError:
            word = KEPT
        if word != GO:
            self._look_whether_killed(word)

    def replace(self) -> None:
        """From its return on this process has to serve. Raises Unavailable where the running node serves
        on."""
        if self._was_killed:
            return
        try:
            self._connection.sendall(SERVES)
        except OSError:
            self._look_whether_killed(self._last_word())

    def _look_whether_killed(self, word: bytes) -> None:
        """Raises Unavailable where it was not. word: its last one, empty where it said none."""
        # Closed first, so that it can no longer agree.
        self._connection.close()
        if word or _answers(self._path):
            raise Unavailable("the running node did not wait, and serves on; try again", operation="node")
        self._was_killed = True

    def _last_word(self) -> bytes:
        for _ in range(2):  # the first may say only that it left something unread
            try:
                return self._connection.recv(WORD_BYTES_MAX)
            except ConnectionError:
                continue
            except OSError:
                return KEPT
        return b""

    def let_end(self) -> None:
        """After replace(), when this process has joined its master: the other one ends."""
        self._connection.close()
        os.close(self.lock)

    def close(self) -> None:
        """The running node serves on."""
        self._connection.close()
        os.close(self.lock)
        for each in self.http:
            each.close()

    def _send(self, message: bytes) -> None:
        try:
            self._connection.sendall(message)
        except OSError as error:
            raise _ended(error) from error

    def _receive(self) -> tuple[bytes, list[int]]:
        try:
            packet, numbers = _receive(self._connection)
        except OSError as error:
            raise _ended(error) from error
        if not packet:
            raise _ended(None)
        return packet, numbers


def find_predecessor(path: Path) -> Predecessor | None:
    """The node of this user that serves the socket ``path``; None: there is none. Raises ConfigError where it
    is of another release that hands over in another way, or has another take-over under way."""
    where = paths.socket_take_over(path)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(ANSWER_S)
    numbers: list[int] = []
    try:
        connection.connect(str(where))
        if not is_same_user(connection):
            raise _refusal(f"{where} is served by a process of another user")
        packet, numbers = _receive(connection)
        facts = msgspec.json.decode(packet, type=Facts)
        if VERSIONS.common(facts.versions) is None:
            why = VERSIONS.none_in_common("this release", facts.versions, "the running node", WHAT)
            raise _refusal(f"{why}; or stop the running node and start this one")
        if len(numbers) != 1 + facts.http_sockets:
            raise _refusal(facts.refused or "the running node sent no descriptors")
        return Predecessor(connection, path, facts, numbers)
    except (FileNotFoundError, ConnectionRefusedError):
        connection.close()
        return None
    except (OSError, msgspec.DecodeError) as error:
        _close_all(numbers)
        connection.close()
        raise ConfigError(
            f"the node at {path} does not hand over: {error}", operation="node", peer=str(path), cause=error
        ) from error
    except Error:
        _close_all(numbers)
        connection.close()
        raise


class Offer:
    """Hands the node over to a process that asks for it, one at a time; the others are refused.

    facts: what to say, and the descriptors that go with it: the lock, then those of the pages.
    give: stops serving; (descriptor of a description, which is closed here, and further ones).
    take_back: the node serves as before, its KV events included. let_go: called once the other process
    serves, and has joined its master.
    """

    def __init__(
        self,
        path: Path,
        facts: Callable[[], tuple[Facts, Sequence[int]]],
        *,
        give: Callable[[], tuple[int, Sequence[int]]],
        take_back: Callable[[], None],
        close_events: Callable[[], None],
        let_go: Callable[[], None],
    ) -> None:
        self._path = paths.socket_take_over(path)
        self._facts = facts
        self._give, self._take_back = give, take_back
        self._close_events, self._let_go = close_events, let_go
        self._busy = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="node-take-over", daemon=True)
        self._callers: dict[threading.Thread, socket.socket] = {}
        self._gives = False  # the node to one of them
        try:
            self._path.unlink(missing_ok=True)
            mask = os.umask(0o177)
            try:
                self._socket.bind(str(self._path))
            finally:
                os.umask(mask)
            self._socket.listen(4)
        except OSError as error:
            self._socket.close()
            self._closed = True
            _log.warning("no other process can take over from this node: %s: %s", self._path, error.strerror)
            return
        self._thread.start()

    def close(self) -> None:
        """Ends the offer; waits for a take-over that has begun. May be called twice."""
        if self._closed:
            return
        self._closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        if self._thread is not threading.current_thread():
            self._thread.join()
        for caller, connection in list(self._callers.items()):
            if not self._gives:  # one that only waits to ask is not waited for
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            if caller is not threading.current_thread():
                caller.join()

    def _serve(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                if self._closed:
                    return
                _log.warning("another process could not be answered: %s", error.strerror or error)
                time.sleep(1.0)  # out of descriptors
                continue
            caller = threading.Thread(
                target=self._answer, args=(connection,), name="node-successor", daemon=True
            )
            self._callers = {each: held for each, held in self._callers.items() if each.is_alive()}
            self._callers[caller] = connection
            caller.start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            if not is_same_user(connection):
                return
            facts, descriptors = self._facts()
            if not self._busy.acquire(blocking=False):
                other = "another process takes over from it at this moment"
                connection.sendall(
                    msgspec.json.encode(msgspec.structs.replace(facts, refused=other, http_sockets=0))
                )
                return
            try:
                connection.settimeout(ANSWER_S)
                socket.send_fds(connection, [msgspec.json.encode(facts)], list(descriptors))
                version = given_version(connection.recv(WORD_BYTES_MAX))
                if version is not None and version not in VERSIONS:
                    spoken = VersionRange(version, version)
                    why = VERSIONS.none_in_common("the running node", spoken, "the new process", WHAT)
                    connection.sendall(why.encode())
                elif version is not None and not self._closed:
                    self._gives = True
                    try:
                        self._hand_over(connection)
                    finally:
                        self._gives = False
            finally:
                self._busy.release()

    def _hand_over(self, connection: socket.socket) -> None:
        began_s = time.monotonic()
        try:
            description, descriptors = self._give()
        except Error as error:
            connection.sendall(f"the running node cannot be taken over: {error}".encode())
            return
        why = "it ended"
        serves = False
        try:
            try:
                take_s = TAKE_S + os.fstat(description).st_size / TAKE_BYTES_PER_S
                _send_all(connection, [description, *descriptors])
            finally:
                os.close(description)
            connection.settimeout(take_s)
            if connection.recv(WORD_BYTES_MAX) == TAKEN:
                self._close_events()
                connection.settimeout(SERVE_S)
                connection.sendall(GO)
                serves = connection.recv(WORD_BYTES_MAX) == SERVES
        except Exception as error:  # whatever it is: this node has to serve again
            why = str(error) or type(error).__name__
        if not serves and not _keep(connection):
            # Closed first: the other process must know that it is not to serve before this one does.
            connection.close()
            self._take_back()
            took_ms = (time.monotonic() - began_s) * 1000
            _log.warning(
                "the process that was to take over did not (%s); this one serves on, after %.0f ms",
                why,
                took_ms,
            )
            return
        # Of two connections of one node the master follows the newer; without any it takes the node for lost.
        with suppress(OSError):
            connection.settimeout(JOIN_S)
            connection.recv(1)
        self._let_go()


def _keep(connection: socket.socket) -> bool:
    """Tells the other process that this one serves on. True: that one had said before that it serves."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RD)  # it can say nothing more, but what it said is still there
    connection.settimeout(0)
    try:
        while word := connection.recv(WORD_BYTES_MAX):
            if word == SERVES:
                return True
    except OSError:
        pass
    with suppress(OSError):
        connection.sendall(KEPT)
    return False


def _send_all(connection: socket.socket, numbers: Sequence[int]) -> None:
    """The first packet says how many descriptors there are."""
    for at in range(0, len(numbers), DESCRIPTORS_MAX):
        text = str(len(numbers)).encode() if at == 0 else b"more"
        socket.send_fds(connection, [text], list(numbers[at : at + DESCRIPTORS_MAX]))


def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    packet, numbers, _, _ = socket.recv_fds(
        connection, PACKET_BYTES_MAX, DESCRIPTORS_MAX, socket.MSG_CMSG_CLOEXEC
    )
    return packet, list(numbers)


def _close_all(numbers: Sequence[int]) -> None:
    for number in numbers:
        os.close(number)


def _answers(path: Path) -> bool:
    """Whether the node at ``path`` lives: it says what it is. One that was killed refuses connections."""
    give_up_s = time.monotonic() + LOOK_S
    while time.monotonic() < give_up_s:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            probe.settimeout(LOOK_S)
            try:
                probe.connect(str(paths.socket_take_over(path)))
                packet, numbers = _receive(probe)
            except (ConnectionRefusedError, FileNotFoundError):
                return False
            except OSError:
                packet, numbers = b"", []
            _close_all(numbers)
            if packet:
                return True
        time.sleep(LOOK_PAUSE_S)  # the kernel closes a killed process's sockets one after the other
    return True


def _text(value: object) -> str:
    return "none" if value is None else str(value)


def _refusal(what: str, key: str = "--take-over") -> ConfigError:
    return ConfigError(what, operation="node", key=key)


def _ended(error: OSError | None) -> Unavailable:
    why = "" if error is None else f" ({error.strerror or error})"
    return Unavailable(f"the running node ended the take-over{why}; try again", operation="node", cause=error)
