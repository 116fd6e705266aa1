"""Names in etcd: one key for each, with a lease, by etcd's JSON gateway (v3; etcd 3.4 and later).

The key is written only where the transaction sees what was looked at: nothing, or an entry of this engine.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence

from moonpool.core.errors import ProtocolError, Unavailable
from moonpool.core.service.addresses import Address, parse_address
from moonpool.core.service.etcd import Etcd, KeptAlive, Lease, Range, Session, Txn, encoded, value_of
from moonpool.core.transfer.metadata.backend import LEASE_S, TIMEOUT_S, Metadata, asking, taken
from moonpool.core.transfer.metadata.record import SegmentRecord, decode, key_of, mark_of

TRIES = 3  # of a transaction that another writer overtook


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
        self._etcd = Etcd(
            endpoints, user=user, password=password, tls=tls, timeout_s=timeout_s, caller="engine"
        )
        self._leases: dict[str, int] = {}  # id of an engine -> its lease
        self.lease_s = lease_s
        self.towards: Address = parse_address(endpoints[0], "metadata")
        self.shown = self._etcd.shown

    def publish(self, record: SegmentRecord, *, dead: str = "") -> None:
        """See Metadata."""
        with asking(self.shown, "publish"):
            ask = self._etcd.session("publish")
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
                self._etcd.session("withdraw").ask("/v3/lease/revoke", {"ID": lease}, Lease)

    def resolve(self, tenant: str, name: str) -> SegmentRecord | None:
        """See Metadata."""
        with asking(self.shown, "resolve"):
            found = self._etcd.session("resolve").ask(
                "/v3/kv/range", {"key": encoded(key_of(tenant, name))}, Range
            )
            return decode(value_of(found.kvs[0]), self.shown) if found.kvs else None

    def _lease_of(self, owner: str, ask: Session) -> int:
        """The engine's lease, renewed; or a new one where that has ended."""
        lease = self._leases.get(owner, 0)
        if lease and ask.ask("/v3/lease/keepalive", {"ID": lease}, KeptAlive).result.TTL > 0:
            return lease
        granted = ask.ask("/v3/lease/grant", {"TTL": max(1, round(self.lease_s))}, Lease)
        if not granted.ID:
            raise ProtocolError(f"{self.shown} granted no lease", operation="publish", peer=self.shown)
        self._leases[owner] = granted.ID
        return granted.ID

    def _written(self, record: SegmentRecord, dead: str, lease: int, ask: Session) -> bool:
        """Whether the key is the engine's now; False: another writer came between. Raises NameTaken."""
        key, text = encoded(record.key), record.encode()
        as_it_is = [
            {"key": key, "target": "LEASE", "lease": str(lease)},
            {"key": key, "target": "VALUE", "value": encoded(text)},
        ]
        looked = ask.ask(
            "/v3/kv/txn", {"compare": as_it_is, "failure": [{"request_range": {"key": key}}]}, Txn
        )
        if looked.succeeded:
            return True
        if not looked.responses:
            raise ProtocolError(f"{self.shown} says nothing of the key", operation="publish", peer=self.shown)
        rows = looked.responses[0].response_range.kvs
        if not rows:
            seen = {"key": key, "target": "CREATE", "create_revision": "0"}
        else:
            held = value_of(rows[0])
            marks = (mark_of(record.id), *([mark_of(dead)] if dead else []))
            if rows[0].lease and not held.startswith(marks):
                left = ask.ask("/v3/lease/timetolive", {"ID": rows[0].lease}, Lease)
                raise taken(record, held, float(max(left.TTL, 0)), self.shown)
            seen = {"key": key, "target": "MOD", "mod_revision": str(rows[0].mod_revision)}
        put = {"request_put": {"key": key, "value": encoded(text), "lease": str(lease)}}
        return ask.ask("/v3/kv/txn", {"compare": [seen], "success": [put]}, Txn).succeeded
