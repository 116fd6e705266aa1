"""Which of several masters owns the directory, and which is its standby: by transactions in etcd.

One key says it: {"term", "owner", "standby"}. It is changed only where it is as it was read, so of two
masters that change it at the same moment one does. Beside it each master keeps a key of its own with a lease.

- The owner enters its standby once that knows all; until then, while the key names another one, removals
  wait. When it has lost the standby, it takes it out again, and only then goes on alone.
- The standby, once its owner is lost, enters itself as the owner, where the key still names it as the
  standby. It waits for no lease: what the owner acknowledged it knows, and the owner can acknowledge no more.
- An owner that its standby asks for its place (moonpool promote) enters that one, and hands over then: what
  was begun is ended before, and what comes meanwhile waits.
- An owner without a standby depends on its lease: it orders no removals when it could not renew that in time,
  and where it has ended any master may enter itself, and begins as a new master does.
- Where there is a standby no lease counts, so owner and standby go on without etcd. Both are known to be gone
  where other processes have their addresses: then one of those enters itself. Else a person says so
  (moonpool promote).
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

import msgspec
from msgspec import structs

from moonpool.core.errors import ProtocolError
from moonpool.core.service.etcd import Etcd, KeptAlive, Lease, Range, Txn, encoded, value_of

if TYPE_CHECKING:
    from moonpool import _native

LEASE_S = 5.0
LOOK_S = 0.25  # between two looks at the key
ASKED_S = 0.05  # between two looks whether the standby asks for its owner's place
TIMEOUT_S = 1.0  # of one look
SAFE_SHARE = 0.6  # of its lease, for which an owner trusts that it was not given up
GIVEN_S = 1.0  # in which the word of an owner that hands over arrives, behind the key

_log = logging.getLogger("moonpool.master")


class Seat(msgspec.Struct, frozen=True):
    """A master: a process (id) and where others reach it (address, host:port)."""

    id: str
    address: str

    @property
    def name(self) -> str:
        """As a standby tells it to its owner."""
        return f"{self.id}@{self.address}"

    @classmethod
    def of(cls, name: str) -> Seat:
        """The reverse of ``name``."""
        id, _, address = name.partition("@")
        return cls(id, address)


class Record(msgspec.Struct, frozen=True):
    """The content of the key. term: grows with each owner."""

    term: int
    owner: Seat
    standby: Seat | None = None


class Read(msgspec.Struct, frozen=True):
    """The key as it was read. revision: 0 where there is none."""

    record: Record | None
    revision: int


class Ballot:
    """The keys in etcd under ``prefix``. Each method raises a moonpool Error, OSError, HTTPException,
    ValueError or MsgspecError when etcd does not answer as it should.
    """

    def __init__(self, etcd: Etcd, prefix: str, me: Seat, *, lease_s: float = LEASE_S) -> None:
        self.me = me
        self.lease_s = lease_s
        self._etcd = etcd
        self._key = f"{prefix}/owner"
        self._lives = f"{prefix}/alive/"
        self._lease = 0

    def keep_alive(self) -> None:
        """Renews the lease of this master's own key, or makes both anew."""
        ask = self._etcd.session("election")
        if self._lease and ask.ask("/v3/lease/keepalive", {"ID": self._lease}, KeptAlive).result.TTL > 0:
            return
        self._lease = ask.ask("/v3/lease/grant", {"TTL": max(1, round(self.lease_s))}, Lease).ID
        own = {"key": encoded(self._lives + self.me.id), "value": encoded(self.me.name)}
        ask.ask("/v3/kv/put", own | {"lease": str(self._lease)}, Range)

    def read(self) -> Read:
        """Raises ProtocolError for content that is none of ours."""
        found = self._etcd.session("election").ask("/v3/kv/range", {"key": encoded(self._key)}, Range)
        if not found.kvs:
            return Read(None, 0)
        try:
            record = msgspec.json.decode(value_of(found.kvs[0]), type=Record)
        except msgspec.MsgspecError as error:
            raise ProtocolError(
                f"{self._key} in {self._etcd.shown} is no record of a master ({error}); remove the key",
                operation="election",
                peer=self._etcd.shown,
            ) from error
        return Read(record, found.kvs[0].mod_revision)

    def write(self, read: Read, record: Record) -> bool:
        """Whether the key was as ``read``, and is ``record`` now."""
        key = encoded(self._key)
        seen = {"key": key, "target": "MOD", "mod_revision": str(read.revision)}
        if not read.revision:
            seen = {"key": key, "target": "CREATE", "create_revision": "0"}
        put = {"request_put": {"key": key, "value": encoded(msgspec.json.encode(record))}}
        session = self._etcd.session("election")
        return session.ask("/v3/kv/txn", {"compare": [seen], "success": [put]}, Txn).succeeded

    def living(self) -> tuple[Seat, ...]:
        """The masters whose leases run."""
        end = self._lives[:-1] + chr(ord(self._lives[-1]) + 1)
        question = {"key": encoded(self._lives), "range_end": encoded(end)}
        found = self._etcd.session("election").ask("/v3/kv/range", question, Range)
        return tuple(Seat.of(value_of(row).decode(errors="replace")) for row in found.kvs)

    def leave(self) -> None:
        """Ends the lease: others need not wait for its end."""
        if self._lease:
            self._etcd.session("election").ask("/v3/lease/revoke", {"ID": self._lease}, Lease)


class Election:
    """Makes ``server`` what the key says, and the key what has become of ``server``; a thread of its own."""

    def __init__(self, ballot: Ballot, server: _native.MasterServer) -> None:
        self._ballot = ballot
        self._server = server
        self._stop = threading.Event()
        self._renewed_s = 0.0
        self._trouble = ""
        self.record: Record | None = None  # as of the last look
        self._named_s = (
            0.0  # since when the key names this master, which hears its owner still; 0: it does not
        )
        self._thread = threading.Thread(target=self._run, name="mp-election", daemon=True)

    def start(self) -> None:
        """Returns at once; the first look comes soon."""
        self._thread.start()

    def stop(self) -> None:
        """The key stays as it is: a standby takes it over, or this master finds it at its next start."""
        self._stop.set()
        self._thread.join()
        try:
            self._ballot.leave()
        except Exception as error:  # etcd is away: the lease ends by itself
            _log.info("the lease of this master ends by itself: %s", error)

    def shown(self) -> dict[str, object]:
        """For /stat: the key as of the last look, and why a later one failed."""
        return {"record": structs.asdict(self.record) if self.record else None, "trouble": self._trouble}

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                began_s = time.monotonic()
                self._ballot.keep_alive()
                self._renewed_s = began_s
                self.look()
                self._say("")
            except Exception as error:  # of whatever kind: a master without etcd goes on, as long as it may
                self._say(str(error))
            self._pause()

    def _pause(self) -> None:
        """Until the next look: LOOK_S, or until the standby asks for this owner's place."""
        for _ in range(round(LOOK_S / ASKED_S)):
            if self._stop.wait(ASKED_S) or self._server.gives_to():
                return

    def _say(self, trouble: str) -> None:
        if bool(trouble) != bool(self._trouble):
            if trouble:
                _log.warning("the election is out of reach, all stays as it is: %s", trouble)
            else:
                _log.info("the election is in reach")
        self._trouble = trouble

    def look(self) -> None:
        """One look at the key, and what follows from it. Raises as Ballot does."""
        read = self._ballot.read()
        self.record = record = read.record
        if record is None:
            self._enter(read, 1)
        elif record.owner.id == self._ballot.me.id:
            self._as_owner(read, record)
        else:
            self._as_another(read, record)

    def _as_owner(self, read: Read, record: Record) -> None:
        server = self._server
        if server.role != "owner":
            # A former owner that hands over tells more than the key.
            now_s = time.monotonic()
            self._named_s = (self._named_s or now_s) if server.hears_owner else 0.0
            if self._named_s and now_s - self._named_s < GIVEN_S:
                return
            server.take_over()
        self._named_s = 0.0
        if heir := server.gives_to():
            return self._hand_over(read, record, Seat.of(heir))
        name, attached, whole, _ = server.standby()
        wanted = record.standby
        if attached and whole:
            wanted = Seat.of(name)
        elif not attached:
            wanted = None
        if not self._name(read, record, wanted):
            return  # another look tells why
        server.set_valid_for(None if wanted else self._valid_s())
        if not attached:
            server.take_over()  # none takes over: it goes on alone

    def _name(self, read: Read, record: Record, standby: Seat | None) -> bool:
        """Enters the standby, or that there is none. Whether the key says so, and the server knows: only the
        word of a standby that the key names lets it acknowledge removals, as any other may take over.
        """
        now, before = standby.name if standby else "", record.standby.name if record.standby else ""
        if standby == record.standby:
            return self._server.set_elected_standby(now)
        if standby is None:
            # Also where the answer to the write is lost: any other master may enter itself behind the lease.
            self._server.set_valid_for(self._valid_s())
        # While the key may have either content, one that only one of the two names does not count.
        if not self._server.set_elected_standby((now or before) if not (now and before) else None):
            return False
        changed = self._ballot.write(read, structs.replace(record, standby=standby))
        return changed and self._server.set_elected_standby(now)

    def _hand_over(self, read: Read, record: Record, heir: Seat) -> None:
        # Only to the one that the key names: any other master may know less.
        entered = record.standby == heir and self._ballot.write(read, Record(record.term + 1, heir))
        if not entered:
            self._server.keep()
        elif not self._server.give():
            self._server.follow(
                heir.address
            )  # too late: the key names another, and this master orders nothing

    def _as_another(self, read: Read, record: Record) -> None:
        server, me = self._server, self._ballot.me
        # Its owner may hand over at any time: then it orders as long as it may hold its lease.
        server.set_valid_for(self._valid_s())
        self._named_s = 0.0
        if server.role in ("owner", "superseded") or server.standby()[0] != record.owner.address:
            server.follow(record.owner.address)
        is_standby = record.standby is not None and record.standby.id == me.id
        if server.role == "acting" and is_standby:
            self._enter(read, record.term + 1)
            return
        if server.standby()[1]:
            return  # the owner is there
        living = self._ballot.living()

        def is_gone(seat: Seat) -> bool:
            return any(other.address == seat.address and other.id != seat.id for other in living)

        if record.standby is None:
            if record.owner not in living:
                self._enter(read, record.term + 1)
        elif is_gone(record.owner) and (is_standby or is_gone(record.standby)):
            self._enter(read, record.term + 1)

    def _enter(self, read: Read, term: int) -> None:
        """This master is the owner from now on, if no other one came first."""
        ballot = self._ballot
        if ballot.write(read, Record(term, ballot.me)):
            _log.warning("this master owns the directory, term %d", term)
            self._server.set_valid_for(self._valid_s())
            self._server.take_over()

    def _valid_s(self) -> float:
        """For so long no other master takes this one's lease for ended."""
        return max(0.0, SAFE_SHARE * self._ballot.lease_s - (time.monotonic() - self._renewed_s))
