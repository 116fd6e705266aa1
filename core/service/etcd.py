"""A client of etcd's JSON gateway (v3; etcd 3.4 and later): requests one by one, within a deadline, asked of
one member after the other. It holds no connection between two calls.
"""

from __future__ import annotations

import base64
import http.client
import ssl
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from moonpool.core.errors import AuthError, ConfigError, Error, Unavailable
from moonpool.core.printable import printable, without_password
from moonpool.core.service.http_get import Answer, exchange
from moonpool.core.service.store_url import ETCD_PORT, address_in, trusting, who_and_place

T = TypeVar("T")
ANSWER_BYTES_MAX = 1 << 20
MEMBER_SHARE = 0.5  # of the time that is left: a member that is silent leaves the others as much
REFUSALS = ("authentication failed", "invalid user", "permission denied", "user name is empty", "auth token")


class KeyValue(msgspec.Struct):
    """A key, without its name."""

    value: str = ""
    lease: int = 0
    mod_revision: int = 0


class Range(msgspec.Struct):
    """The answer of /v3/kv/range."""

    kvs: tuple[KeyValue, ...] = ()


class TxnAnswer(msgspec.Struct):
    """Of one operation within a transaction."""

    response_range: Range = msgspec.field(default_factory=Range)


class Txn(msgspec.Struct):
    """The answer of /v3/kv/txn."""

    succeeded: bool = False
    responses: tuple[TxnAnswer, ...] = ()


class Lease(msgspec.Struct):
    """Of /v3/lease/grant and /v3/lease/timetolive; TTL in seconds."""

    ID: int = 0
    TTL: int = 0


class KeptAlive(msgspec.Struct):
    """Of /v3/lease/keepalive."""

    result: Lease = msgspec.field(default_factory=Lease)


class Token(msgspec.Struct):
    """Of /v3/auth/authenticate."""

    token: str = ""


class Etcd:
    """endpoints: of the members, "host:port", asked in turn; user, password: "" for none; tls: None: plain.
    timeout_s: of a session. caller: what an error calls this one.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        user: str = "",
        password: str = "",
        tls: ssl.SSLContext | None = None,
        timeout_s: float,
        caller: str = "process",
    ) -> None:
        scheme = "http" if tls is None else "https"
        self._urls = [f"{scheme}://{one}" for one in endpoints]
        self._user = {"name": user, "password": password} if user else None
        self._token = ""
        self._tls = tls
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self.caller = caller
        self.shown = f"etcd at {', '.join(endpoints)}"

    def session(self, operation: str) -> Session:
        """Requests that share one deadline, from now on. operation: for errors."""
        return Session(self, operation)


class Session:
    """See Etcd.session()."""

    def __init__(self, store: Etcd, operation: str) -> None:
        self._store = store
        self._operation = operation
        self._give_up_s = time.monotonic() + store._timeout_s

    def ask(self, path: str, body: Mapping[str, Any], kind: type[T]) -> T:
        """The answer of the first member that has one, as a ``kind``; empty for a lease that has ended."""
        store = self._store
        trouble: Exception = TimeoutError()
        for number in range(len(store._urls)):
            left_s = self._give_up_s - time.monotonic()
            if left_s <= 0:
                break
            url = store._urls[0]
            is_last = number == len(store._urls) - 1
            try:
                return self._ask(url, path, body, kind, left_s if is_last else left_s * MEMBER_SHARE)
            except AuthError:
                raise
            except (OSError, http.client.HTTPException, ValueError, msgspec.MsgspecError, Error) as error:
                trouble = error
                with store._lock:
                    if store._urls[0] == url:  # the next one is asked first from now on
                        store._urls.append(store._urls.pop(0))
        raise trouble

    def _ask(self, url: str, path: str, body: Mapping[str, Any], kind: type[T], timeout_s: float) -> T:
        store = self._store
        if store._user is not None and not store._token:
            login = self._post(url, "/v3/auth/authenticate", store._user, timeout_s)
            store._token = self._read(login, Token).token
        answer = self._post(url, path, body, timeout_s)
        if answer.status == 401 and store._user is not None:  # etcd forgets tokens after five minutes
            login = self._post(url, "/v3/auth/authenticate", store._user, timeout_s)
            store._token = self._read(login, Token).token
            answer = self._post(url, path, body, timeout_s)
        return self._read(answer, kind)

    def _post(self, url: str, path: str, body: Mapping[str, Any], timeout_s: float) -> Answer:
        left_s = min(timeout_s, self._give_up_s - time.monotonic())
        if left_s <= 0:
            raise TimeoutError
        return exchange(
            "POST",
            url + path,
            body=msgspec.json.encode(body),
            headers={"Authorization": self._store._token} if self._store._token else {},
            timeout_s=left_s,
            tls=self._store._tls,
            answer_bytes_max=ANSWER_BYTES_MAX,
        )

    def _read(self, answer: Answer, kind: type[T]) -> T:
        if answer.status == 200:
            return msgspec.json.decode(answer.body, type=kind, strict=False)  # it writes numbers as text
        said = answer.body[:200].decode(errors="replace").strip()
        if any(word in said for word in REFUSALS):
            raise AuthError(
                f"{self._store.shown} refuses this {self._store.caller}: {printable(said)}",
                operation=self._operation,
                peer=self._store.shown,
            )
        if "lease not found" in said:
            return kind()
        raise Unavailable(
            f"{self._store.shown} answered {answer.status}: {printable(said)}",
            operation=self._operation,
            peer=self._store.shown,
        )


def etcd_of(url: str, *, password: str = "", authorities: str = "", timeout_s: float, key: str) -> Etcd:
    """Of etcd://[user[:password]@]host[:2379],... (etcds: by TLS). Raises ConfigError that names ``key``.

    password: where ``url`` has none. authorities: a file (PEM) of those that TLS trusts; "": the system's.
    """
    scheme, _, rest = url.partition("://")
    try:
        if scheme not in ("etcd", "etcds"):
            raise ValueError("no scheme of etcd")
        user, given, places = who_and_place(rest.rstrip("/"))
        endpoints = [str(address_in(one, ETCD_PORT)) for one in places.split(",")]
    except ValueError as error:
        raise ConfigError(
            f"{key} = {without_password(url)} names no etcd; write etcd://host:2379,host:2379",
            operation="config",
            key=key,
        ) from error
    return Etcd(
        endpoints,
        user=user,
        password=given or (password if user else ""),
        tls=trusting(authorities) if scheme == "etcds" else None,
        timeout_s=timeout_s,
    )


def encoded(text: str | bytes) -> str:
    """A key or a value, as the gateway writes it."""
    return base64.b64encode(text.encode() if isinstance(text, str) else text).decode()


def value_of(row: KeyValue) -> bytes:
    """Its value."""
    return base64.b64decode(row.value)
