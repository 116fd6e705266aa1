"""Names in etcd: one key for each, with a lease, by etcd's JSON gateway (v3; etcd 3.4 and later).

The key is written only where the transaction sees what was looked at: nothing, or an entry of this engine.
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

from moonpool.core.errors import AuthError, Error, ProtocolError, Unavailable
from moonpool.core.printable import printable
from moonpool.core.service.addresses import Address, parse_address
from moonpool.core.service.http_get import Answer, exchange
from moonpool.core.transfer.metadata.backend import (
    ANSWER_BYTES_MAX,
    LEASE_S,
    TIMEOUT_S,
    Metadata,
    asking,
    refused,
    taken,
)
from moonpool.core.transfer.metadata.record import SegmentRecord, decode, key_of, mark_of

T = TypeVar("T")
MEMBER_SHARE = 0.5  # of the time that is left: a member that is silent leaves the others as much
REFUSALS = ("authentication failed", "invalid user", "permission denied", "user name is empty", "auth token")
TRIES = 3  # of a transaction that another writer overtook


class _KeyValue(msgspec.Struct):
    value: str = ""
    lease: int = 0
    mod_revision: int = 0


class _Range(msgspec.Struct):
    kvs: tuple[_KeyValue, ...] = ()


class _TxnAnswer(msgspec.Struct):
    response_range: _Range = msgspec.field(default_factory=_Range)


class _Txn(msgspec.Struct):
    succeeded: bool = False
    responses: tuple[_TxnAnswer, ...] = ()


class _Lease(msgspec.Struct):
    ID: int = 0
    TTL: int = 0


class _KeptAlive(msgspec.Struct):
    result: _Lease = msgspec.field(default_factory=_Lease)


class _Token(msgspec.Struct):
    token: str = ""


class EtcdMetadata(Metadata):
    """endpoints: of the members, "host:port", asked in turn; user, password: "" for none; tls: None: plain.

    etcd knows leases of whole seconds, and none that are shorter than its elections (2 s).
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        user: str = "",
        password: str = "",
        tls: ssl.SSLContext | None = None,
        lease_s: float = LEASE_S,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        scheme = "http" if tls is None else "https"
        self._urls = [f"{scheme}://{one}" for one in endpoints]
        self._user = {"name": user, "password": password} if user else None
        self._token = ""
        self._tls = tls
        self._timeout_s = timeout_s
        self._leases: dict[str, int] = {}  # id of an engine -> its lease
        self._lock = threading.Lock()
        self.lease_s = lease_s
        self.towards: Address = parse_address(endpoints[0], "metadata")
        self.shown = f"etcd at {', '.join(endpoints)}"

    def publish(self, record: SegmentRecord, *, dead: str = "") -> None:
        """See Metadata."""
        with asking(self.shown, "publish"):
            ask = _Session(self, "publish")
            for _ in range(TRIES):
                lease = self._lease_of(record.id, ask)
                if self._written(record, dead, lease, ask):
                    return
            raise Unavailable(
                f"another writer changes {record.name} in {self.shown} all the time",
                operation="publish",
                peer=self.shown,
            )

    def withdraw(self, record: SegmentRecord) -> None:
        """See Metadata. The key goes with its lease."""
        with asking(self.shown, "withdraw"):
            lease = self._leases.pop(record.id, 0)
            if lease:
                _Session(self, "withdraw").ask("/v3/lease/revoke", {"ID": lease}, _Lease)

    def resolve(self, tenant: str, name: str) -> SegmentRecord | None:
        """See Metadata."""
        with asking(self.shown, "resolve"):
            found = _Session(self, "resolve").ask("/v3/kv/range", {"key": _b64(key_of(tenant, name))}, _Range)
            return decode(_text(found.kvs[0]), self.shown) if found.kvs else None

    def _lease_of(self, owner: str, ask: _Session) -> int:
        """The engine's lease, renewed; or a new one where that has ended."""
        lease = self._leases.get(owner, 0)
        if lease and ask.ask("/v3/lease/keepalive", {"ID": lease}, _KeptAlive).result.TTL > 0:
            return lease
        granted = ask.ask("/v3/lease/grant", {"TTL": max(1, round(self.lease_s))}, _Lease)
        if not granted.ID:
            raise ProtocolError(f"{self.shown} granted no lease", operation="publish", peer=self.shown)
        self._leases[owner] = granted.ID
        return granted.ID

    def _written(self, record: SegmentRecord, dead: str, lease: int, ask: _Session) -> bool:
        """Whether the key is the engine's now; False: another writer came between. Raises NameTaken."""
        key, text = _b64(record.key), record.encode()
        as_it_is = [
            {"key": key, "target": "LEASE", "lease": str(lease)},
            {"key": key, "target": "VALUE", "value": _b64(text)},
        ]
        looked = ask.ask(
            "/v3/kv/txn", {"compare": as_it_is, "failure": [{"request_range": {"key": key}}]}, _Txn
        )
        if looked.succeeded:
            return True
        if not looked.responses:
            raise ProtocolError(f"{self.shown} says nothing of the key", operation="publish", peer=self.shown)
        rows = looked.responses[0].response_range.kvs
        if not rows:
            seen = {"key": key, "target": "CREATE", "create_revision": "0"}
        else:
            held = _text(rows[0])
            marks = (mark_of(record.id), *([mark_of(dead)] if dead else []))
            if rows[0].lease and not held.startswith(marks):
                left = ask.ask("/v3/lease/timetolive", {"ID": rows[0].lease}, _Lease)
                raise taken(record, held, float(max(left.TTL, 0)), self.shown)
            seen = {"key": key, "target": "MOD", "mod_revision": str(rows[0].mod_revision)}
        put = {"request_put": {"key": key, "value": _b64(text), "lease": str(lease)}}
        return ask.ask("/v3/kv/txn", {"compare": [seen], "success": [put]}, _Txn).succeeded


class _Session:
    """The requests of one call, which share its deadline."""

    def __init__(self, store: EtcdMetadata, operation: str) -> None:
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
            store._token = self._read(login, _Token).token
        answer = self._post(url, path, body, timeout_s)
        if answer.status == 401 and store._user is not None:  # etcd forgets tokens after five minutes
            login = self._post(url, "/v3/auth/authenticate", store._user, timeout_s)
            store._token = self._read(login, _Token).token
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
            raise refused(self._store.shown, self._operation, said)
        if "lease not found" in said:
            return kind()
        raise Unavailable(
            f"{self._store.shown} answered {answer.status}: {printable(said)}",
            operation=self._operation,
            peer=self._store.shown,
        )


def _b64(text: str | bytes) -> str:
    return base64.b64encode(text.encode() if isinstance(text, str) else text).decode()


def _text(row: _KeyValue) -> bytes:
    return base64.b64decode(row.value)
