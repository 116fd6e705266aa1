"""Which workers there are, by place and by name, and which of them a policy may choose."""

from __future__ import annotations

from moonpool.disagg_proxy.conductor.scheduler import EligibleWorkers
from moonpool.disagg_proxy.conductor.worker import Role, Worker
from moonpool.disagg_proxy.tools.simulator.faults import KINDS


class Fleet:
    """counts: of each kind at the beginning: prefill, decode, whole; names are KIND-NUMBER. workers: those
    that may be chosen now, by place. A worker that joins again has its former place, and workers of one
    kind learn together.
    """

    def __init__(self, counts: dict[str, int], room_tokens: int) -> None:
        # Where no worker decodes, a policy must not look for one that does.
        computing = Role.PREFILL if counts["decode"] or counts["whole"] else Role.BOTH
        self._roles = dict(zip(KINDS, (computing, Role.DECODE, Role.BOTH), strict=True))
        self._room_tokens = room_tokens
        self._names: list[str] = []  # by place
        self._numbers = dict.fromkeys(KINDS, 0)
        self.at: list[Worker] = []  # by place, including those that left
        self.workers: tuple[Worker, ...] = ()
        self._asked: tuple[Worker, ...] | None = None
        self._eligible = EligibleWorkers((), ())
        for kind in KINDS:
            for _ in range(counts[kind]):
                self._add(self._make(kind, self._name(kind)))

    def kind(self, place: int) -> str:
        """prefill, decode or whole, of a worker that is or was there."""
        return self._names[place].partition("-")[0]

    def place(self, name: str) -> int:
        """Of a worker that is or was there; -1 for none."""
        return self._names.index(name) if name in self._names else -1

    def join(self, name: str) -> Worker:
        """name: of a kind, or of a worker that is gone."""
        worker = self._make(name.partition("-")[0], name if "-" in name else self._name(name))
        self._add(worker)
        return worker

    def leave(self, name: str) -> Worker:
        """The worker is not chosen any more."""
        worker = self.at[self._names.index(name)]
        self.workers = tuple(each for each in self.workers if each is not worker)
        return worker

    @property
    def eligible(self) -> EligibleWorkers:
        """The workers that may be chosen; none unless one can compute prompts and one can answer."""
        if self._asked is not self.workers:  # it is asked for each request
            self._asked = self.workers
            roles = {worker.role for worker in self.workers}
            serves = Role.BOTH in roles or {Role.PREFILL, Role.DECODE} <= roles
            self._eligible = EligibleWorkers.of(self.workers if serves else ())
        return self._eligible

    def _name(self, kind: str) -> str:
        name = f"{kind}-{self._numbers[kind]}"
        self._numbers[kind] += 1
        return name

    def _add(self, worker: Worker) -> None:
        worker.join_kind(each for each in self.workers if each.role is worker.role)
        self.workers = tuple(sorted((*self.workers, worker), key=lambda each: each.place))

    def _make(self, kind: str, name: str) -> Worker:
        place = self._names.index(name) if name in self._names else len(self._names)
        worker = Worker(place, name, self._roles[kind], room_tokens=self._room_tokens)
        worker.obeys = True
        if place == len(self._names):
            self._names.append(name)
            self.at.append(worker)
        else:
            self.at[place] = worker
        return worker
