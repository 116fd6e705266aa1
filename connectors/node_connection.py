"""The connection of an engine to its node, for engines that serve with or without one.

    absent -> connecting -> joined -> silent -> connecting -> joined ...
                         \\-> absent, or silent again, when the attempt fails

The engine's threads read ``client``, which never waits and is None unless the state is joined. One daemon
thread with a back-off makes the attempts, or, in an engine whose calls may wait, those calls do. Each change
of the state is logged once.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from moonpool.core.errors import AuthError, Error, ProtocolError, Timeout, Unavailable

RETRY_FIRST_S = 1.0
RETRY_MAX_S = 30.0
# Errors which say that the node does not answer; any other error is about the call.
SILENCE = (AuthError, ProtocolError, Timeout, Unavailable)


class State(enum.Enum):
    """Where a NodeConnection stands; the module's docstring has the transitions."""

    ABSENT = enum.auto()
    CONNECTING = enum.auto()
    JOINED = enum.auto()
    SILENT = enum.auto()
    CLOSED = enum.auto()


class Closable(Protocol):
    """A client of the node."""

    def close(self) -> None:
        """Ends the connection."""


@dataclass(frozen=True, slots=True)
class Messages:
    """The log message of each transition: a format of the node's address and, in two of them, the reason."""

    absent: str = (
        "moonpool: no pool at %s (%s); this engine serves without it and joins when a node appears there"
    )
    silent: str = "moonpool: the pool at %s does not answer (%s); prompts are computed"
    joined: str = "moonpool: joined the pool at %s"
    answers: str = "moonpool: the pool at %s answers again"


MESSAGES = Messages()
Client = TypeVar("Client", bound=Closable)
Answer = TypeVar("Answer")


class NodeConnection(Generic[Client]):
    """Owns one client of the node and the thread that looks for the node while it is absent or silent.

    A node that hangs costs its callers one wait: the call that found out reports ``failed``, and from then on
    only the thread asks. Any thread may call any method.
    """

    def __init__(
        self,
        dial: Callable[[], Client],
        *,
        address: str,
        log: Any,
        probe: Callable[[Client], object] = lambda client: None,
        on_joined: Callable[[Client], object] = lambda client: None,
        on_left: Callable[[], object] = lambda: None,
        failures: tuple[type[Exception], ...] = (Error,),
        background: bool = True,
        retry_s: float | None = None,
        log_retry: Callable[..., None] = lambda *text: None,
        messages: Messages = MESSAGES,
    ) -> None:
        """dial: returns a connected client; raises one of ``failures`` while there is no node.
        address: of the node, as the log names it.
        log: a logging.Logger, or the engine's own.
        probe: asks the node of a silent client something; raises while the node does not answer.
        on_joined: called when the node answers for the first time and again, before ``client`` returns the
            client; when it raises, the attempt has failed.
        on_left: called when a joined node is found silent.
        failures: errors of the first attempt that mean "no node now"; ``open`` lets others through.
        background: whether a thread makes the attempts after the first; else a subclass makes them.
        retry_s: seconds between two attempts; None: RETRY_FIRST_S, doubling up to RETRY_MAX_S.
        log_retry: logs that an attempt failed for another reason than the one before.
        messages: what the log says of a transition.
        """
        self._dial, self._probe, self._on_joined, self._on_left = dial, probe, on_joined, on_left
        self._address, self._log, self._log_retry, self._messages = address, log, log_retry, messages
        self._failures, self._background, self._retry_s = failures, background, retry_s
        self._changed = threading.Condition()  # guards the next four
        self._state = State.ABSENT
        self._client: Client | None = None
        self._trouble: str | None = None  # why the node is not joined, as it was logged
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()

    @property
    def state(self) -> State:
        """The state now. Never waits."""
        return self._state

    @property
    def client(self) -> Client | None:
        """The client while the node is joined, else None. Never waits."""
        return self._client if self._state is State.JOINED else None

    def open(self, *, required: bool, quiet: bool = False) -> None:
        """Makes the first attempt on the calling thread. When it fails: raises its error if the pool is
        ``required``; otherwise logs it (``quiet``: for debugging only) and starts the thread."""
        try:
            self._attempt(quiet=True)
        except self._failures as error:
            if required:
                raise
            self._attempt_failed(error, quiet=quiet)
            with self._changed:
                self._start_thread()

    def reach(self) -> Client:
        """The client, even of a silent node, for a caller that cannot do without; dials while the node is
        absent. Raises what ``dial`` raises, and Unavailable after ``close``."""
        client = self._client
        return self._attempt() if client is None else client

    def ask(self, call: Callable[[Client], Answer], otherwise: Answer) -> Answer:
        """What ``call`` returns for the client; ``otherwise`` without one, and when it raises Error, of which
        the connection takes note."""
        client = self.client
        if client is None:
            return otherwise
        try:
            return call(client)
        except Error as error:
            self.heard(error)
            return otherwise

    def heard(self, error: Error) -> None:
        """A call raised ``error``: as ``failed``, if it says that the node does not answer."""
        if isinstance(error, SILENCE):
            self.failed(error)

    def failed(self, why: object) -> None:
        """The node did not answer a call. It is silent until the thread hears from it; ``why`` is logged."""
        with self._changed:
            if self._state is not State.JOINED:
                return
            self._state, self._trouble = State.SILENT, str(why)
            self._on_left()
            self._start_thread()
        self._log.warning(self._messages.silent, self._address, why)

    def close(self) -> None:
        """Ends the thread, waits for an attempt under way, and closes the client."""
        self._closing.set()
        with self._changed:
            self._changed.wait_for(lambda: self._state is not State.CONNECTING)
            self._state, thread = State.CLOSED, self._thread
            client, self._client = self._client, None
        if thread is not None:
            thread.join()
        if client is not None:
            client.close()

    def _attempt(self, *, quiet: bool = False) -> Client:
        """Dials, or probes the client that is there, unless another thread's attempt has joined the node.
        quiet: success is not logged. Raises what the callables raise, and Unavailable after close()."""
        with self._changed:
            self._changed.wait_for(lambda: self._state is not State.CONNECTING)
            if self._state is State.CLOSED:
                raise Unavailable("this engine has ended", operation="connect")
            before, known = self._state, self._client
            if before is State.JOINED and known is not None:
                return known
            self._state = State.CONNECTING
        after, client = before, known
        try:
            client = self._dialled() if known is None else self._probed(known)
            after = State.JOINED
        finally:
            with self._changed:
                self._state, self._client = after, client
                if after is State.JOINED:
                    self._trouble = None
                self._changed.notify_all()
        if not quiet:
            text = self._messages.joined if known is None else self._messages.answers
            self._log.info(text, self._address)
        return client

    def _dialled(self) -> Client:
        client = self._dial()
        try:
            self._on_joined(client)
        except BaseException:
            client.close()
            raise
        return client

    def _probed(self, client: Client) -> Client:
        self._probe(client)
        self._on_joined(client)
        return client

    def _attempt_failed(self, error: Exception, *, quiet: bool = False) -> None:
        """Logs the first failure, and later ones of another reason."""
        before, self._trouble = self._trouble, str(error)
        if before is None:
            log = self._log.debug if quiet else self._log.warning
            log(self._messages.absent, self._address, error)
        elif before != self._trouble:
            self._log_retry("moonpool: still no pool at %s (%s)", self._address, error)

    def _start_thread(self) -> None:
        """Called with the lock held. A thread whose attempt was overtaken goes on instead of a second one."""
        if self._background and self._thread is None and not self._closing.is_set():
            self._thread = threading.Thread(target=self._retry, name="moonpool-join", daemon=True)
            self._thread.start()

    def _retry(self) -> None:
        wait_s = RETRY_FIRST_S if self._retry_s is None else self._retry_s
        wait_max_s = RETRY_MAX_S if self._retry_s is None else self._retry_s
        while not self._closing.wait(wait_s):
            wait_s = min(2 * wait_s, wait_max_s)
            try:
                self._attempt()
            except Exception as error:  # the boundary: the engine goes on, and the next attempt may succeed
                self._attempt_failed(error)
            with self._changed:
                if self._state is State.JOINED:
                    self._thread = None
                    return
