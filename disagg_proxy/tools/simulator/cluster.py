"""Simulated instances under a real policy.

    arrival -> what the caches hold of it -> policy.choose -> fetch from another's cache -> prefill
            -> hand-over to decode, layer by layer while prefill runs -> decode -> Results

The policy sees what it sees in the proxy (``SimulatedProxy``): ``Worker`` objects whose loads and models the
``Scheduler`` keeps, from observations of the same form. It does not see the machine, nor how long an answer
will be.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from moonpool.core.errors import ConfigError
from moonpool.disagg_proxy.conductor.worker import Role, Worker
from moonpool.disagg_proxy.data_plane.observations import HandoverForm, Outcome, Stage
from moonpool.disagg_proxy.peers.wire import Change
from moonpool.disagg_proxy.tools.simulator.cache import Caches
from moonpool.disagg_proxy.tools.simulator.engine import PrefillEngine, Surroundings, WholeEngine
from moonpool.disagg_proxy.tools.simulator.events import Events
from moonpool.disagg_proxy.tools.simulator.eviction.study import make_cache
from moonpool.disagg_proxy.tools.simulator.faults import Act, ClusterEvent, check
from moonpool.disagg_proxy.tools.simulator.fleet import Fleet
from moonpool.disagg_proxy.tools.simulator.job import Job
from moonpool.disagg_proxy.tools.simulator.links import Links
from moonpool.disagg_proxy.tools.simulator.loads import Loads
from moonpool.disagg_proxy.tools.simulator.machine import MACHINES, Machine
from moonpool.disagg_proxy.tools.simulator.simulated_proxy import SimulatedProxy
from moonpool.disagg_proxy.tools.simulator.trace import BLOCK_TOKENS, Arrival

TELL_AFTER_S = 0.004  # from one proxy to the others, usually: the wait for more changes, and the way

_bad = partial(ConfigError, operation="simulate")
_DECODE = Role.DECODE  # an enum's members are slow to look up


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """prefill, decode, whole: how many instances of each role; whole ones do both. Prefill without decode or
    whole ones: answers end with their first token.

    pool:         an instance fetches what others' caches hold; else each has its own alone.
    chunk_tokens: of a step that computes prompts, those of running requests included; 0: whole prompts.
    width:        nodes of a prefill instance, in a pipeline of chunks.
    layerwise:    KV is handed over while it is computed; else after the whole prompt.
    eviction:     a name of CACHES: what an instance's prefix cache does when it is full.
    exchanging:   several proxies report to each other their requests in flight, and their blocks.
    tell_after_s: from one proxy's change to the others' knowledge of it.
    """

    prefill: int = 0
    decode: int = 0
    whole: int = 0
    machine: Machine = MACHINES["paper"]
    pool: bool = True
    chunk_tokens: int = 8192
    width: int = 1
    layerwise: bool = True
    eviction: str = "lru"
    exchanging: bool = True
    tell_after_s: float = TELL_AFTER_S

    def __post_init__(self) -> None:
        if min(self.prefill, self.decode, self.whole) < 0 or not self.prefill + self.whole:
            raise _bad("a cluster needs instances that compute prompts: prefill or whole ones")
        if self.decode and not self.prefill:
            raise _bad("decode instances need prefill instances that compute the prompts")
        make_cache(self.eviction, 0)
        if self.width < 1 or self.chunk_tokens < 0 or (self.width > 1 and not self.chunk_tokens):
            raise _bad("a pipeline has a width of 1 or more, and chunks of some tokens")


class Cluster:
    """proxies: the proxies, which take turns. done: called with each request that has ended or is refused."""

    def __init__(
        self,
        settings: ClusterSettings,
        proxies: Sequence[SimulatedProxy],
        done: Callable[[Job], None],
        faults: Iterable[ClusterEvent] = (),
    ) -> None:
        self.settings = settings
        self.events = Events()
        machine = settings.machine
        self.caches = Caches(machine.cache_tokens // BLOCK_TOKENS, partial(make_cache, settings.eviction))
        self.links = Links(machine.link_bytes_s)
        self.loads = Loads()
        self._done = done
        self._arrived = 0
        self._live: dict[int, Job] = {}  # requests that were sent and have not ended
        self._leaving: set[int] = set()  # places
        self.busy_before_s = 0.0  # of engines that were replaced
        self.engines: list[PrefillEngine | WholeEngine] = []
        counts = {"prefill": settings.prefill, "decode": settings.decode, "whole": settings.whole}
        self._proxies = tuple(proxies)
        self._exchanging = settings.exchanging and len(proxies) > 1
        for number, proxy in enumerate(proxies):
            tell = partial(self._tell, number) if self._exchanging else None
            proxy.open(self, Fleet(counts, machine.room_tokens), pool=settings.pool, tell=tell)
        for instance in self.workers:
            self._open(instance.place)
        for each in check(faults, counts):
            self.events.at(each.at_s, partial(self._apply_event, each))

    @property
    def workers(self) -> tuple[Worker, ...]:
        """The workers that may be chosen now, as the first proxy sees them."""
        return self._proxies[0].fleet.workers

    def run(self, arrivals: Iterable[Arrival]) -> None:
        """Runs all arrivals, until the last token."""
        for arrival in arrivals:
            if arrival.at_s < self.events.now_s:
                raise _bad(f"a request comes at {arrival.at_s:g} s, before the one ahead of it")
            self.events.run_before(arrival.at_s)
            if arrival.at_s >= self.loads.next_s:
                self._look(arrival.at_s)
            self._arrived += 1
            job = Job(self._arrived, arrival, self._arrived % len(self._proxies))
            self._proxy(job).arrive(job)
        self.events.run_before(float("inf"))

    def check_integrity(self) -> None:
        """Raises AssertionError when an invariant of a part is broken."""
        for proxy in self._proxies:
            proxy.check_integrity()
        self.caches.check_integrity()
        busy = {place for job in self._live.values() for place in (job.prefill_place, job.decode_place)}
        assert self._leaving <= busy

    # Calls of the engines

    def next(self, job: Job) -> None:
        """Looks up what the caches hold of the prompt at this moment. Where the job ``fetches``, starts the
        transfer of what the instance's own cache lacks, and sets ``ready_s`` to its end."""
        blocks, place, now_s = job.blocks, job.prefill_place, self.events.now_s
        held = self.caches.find(blocks)
        own = held.by_place[place]
        job.own, job.ready_s = own * BLOCK_TOKENS, now_s
        if job.fetches and held.anywhere > own:
            job.fetched = (held.anywhere - own) * BLOCK_TOKENS
            size = job.fetched * self.settings.machine.kv_bytes
            job.ready_s = self.links.send(held.best, place, size, now_s)
            self.caches.keep(place, blocks[: held.anywhere], now_s)

    def computed(self, job: Job) -> None:
        """A prefill engine has computed its prompt."""
        self._settle(job)
        proxy = self._proxy(job)
        decode = self.engines[job.decode_place]
        if isinstance(decode, PrefillEngine):  # no instance decodes
            job.first_s = job.done_s = self.events.now_s
            proxy.observe(job, Stage.BEGUN, handed=HandoverForm.NOT)
            self.ended(job)
            return
        if job.orphan:
            self._again(job)
            return
        proxy.observe(job, Stage.PREFILLED, handed=HandoverForm.TWO_STEP)
        if proxy.rejected_after_prefill(job):
            self._over(job)
            return
        machine = self.settings.machine
        size = job.arrival.tokens * machine.kv_bytes
        begun_s = job.begun_s if self.settings.layerwise else self.events.now_s
        sent_s = self.links.send(job.prefill_place, job.decode_place, size, begun_s)
        job.there_s = max(sent_s, self.events.now_s) + machine.handover_s
        self.events.at(job.there_s, partial(self._handed, job, job.attempt))

    def began(self, job: Job) -> None:
        """Tells its proxy, as the relay would; where another worker computed the prompt, as a hand-over."""
        apart = job.prefill_place != job.decode_place
        self._settle(job)
        self._proxy(job).observe(
            job, Stage.BEGUN, handed=HandoverForm.TWO_STEP if apart else HandoverForm.NOT
        )

    def ended(self, job: Job) -> None:
        """Tells its proxy, then ``done``."""
        self._proxy(job).observe(job, Stage.ENDED, handed=HandoverForm.NOT)
        self._over(job)

    # Calls of the proxies

    def submit(self, job: Job) -> None:
        """Puts it into the queue of the instance at ``prefill_place``, at the current time of ``events``."""
        self._live[job.name] = job
        self.engines[job.prefill_place].submit(job)

    def refused(self, job: Job) -> None:
        """Tells ``done``; no engine has seen it."""
        self._done(job)

    def _proxy(self, job: Job) -> SimulatedProxy:
        return self._proxies[job.proxy]

    def _tell(self, number: int, change: Change) -> None:
        at_s = self.events.now_s + self.settings.tell_after_s
        self.events.at(at_s, partial(self._hear, number, change))

    def _hear(self, number: int, change: Change) -> None:
        for other, proxy in enumerate(self._proxies):
            if other != number:
                proxy.shared.apply(
                    str(number), (change,), self.events.now_s, lag_s=self.settings.tell_after_s
                )

    # What happens to a request

    def _handed(self, job: Job, attempt: int) -> None:
        """Its KV has arrived, unless an instance has died meanwhile."""
        if attempt == job.attempt:
            engine = self.engines[job.decode_place]
            assert isinstance(engine, WholeEngine)
            engine.submit(job)

    def _settle(self, job: Job) -> None:
        """Its prompt has arrived, or will not."""
        if not job.expected:
            return
        job.expected = False
        place, blocks = job.prefill_place, job.blocks
        self._proxy(job).expected.arrived(place, blocks)
        if self._exchanging:  # placed prompts were reported before
            at_s = self.events.now_s + self.settings.tell_after_s
            self.events.at(at_s, partial(self._is_there, job.proxy, place, blocks))

    def _is_there(self, number: int, place: int, blocks: Sequence[int]) -> None:
        for other, proxy in enumerate(self._proxies):
            if other != number:
                proxy.expected.arrived(place, blocks)

    def _again(self, job: Job) -> None:
        """An instance died before the first token."""
        self._settle(job)
        self._left(job)
        self._proxy(job).again(job)

    def _over(self, job: Job) -> None:
        self._left(job)
        self._done(job)

    def _left(self, job: Job) -> None:
        """It has left its instances; one that is leaving may have waited for that."""
        del self._live[job.name]
        for place in (job.prefill_place, job.decode_place):
            if place in self._leaving:
                self._close_if_idle(place)

    # Instances that join, leave, die or slow down

    def _apply_event(self, event: ClusterEvent) -> None:
        if event.act is Act.JOIN:
            known = self._proxies[0].fleet.place(event.name)
            if known in self._leaving:  # it joins again before it has ended what it had
                self._kill(known)
            (place,) = {proxy.join(event.name) for proxy in self._proxies}
            self._open(place)
            return
        if event.act is Act.SLOW:
            self.engines[self._proxies[0].fleet.place(event.name)].slow(event.times)
            return
        (place,) = {proxy.fleet.leave(event.name).place for proxy in self._proxies}
        if event.act is Act.KILL:
            self._kill(place)
        else:
            self._leaving.add(place)
            self._close_if_idle(place)

    def _open(self, place: int) -> None:
        engine = self._engine(place)
        if place == len(self.engines):
            self.engines.append(engine)
            self.caches.add()
            self.links.add()
        else:
            self.busy_before_s += self.engines[place].busy_s
            self.engines[place] = engine

    def _kill(self, place: int) -> None:
        """The instance's blocks are lost; a request that waited for its first token is sent anew, a request
        whose answer had begun is lost."""
        self._leaving.discard(place)
        self.engines[place].dead = True
        self.caches.clear(place)
        now_s = self.events.now_s
        again = []
        for job in list(self._live.values()):
            prompt_there = place == job.prefill_place and now_s < job.there_s
            if job.first_s < math.inf:
                if place == job.decode_place:
                    self._proxy(job).observe(
                        job, Stage.ENDED, handed=HandoverForm.NOT, outcome=Outcome.BROKEN_OFF
                    )
                    job.why_not = "lost"
                    self._over(job)
            elif prompt_there or (place == job.decode_place and job.computed_s < math.inf):
                again.append(job)
            elif place == job.decode_place:
                job.orphan = True  # sent anew once its prompt is computed, which then is found
        self._close(place)
        for job in again:
            self._again(job)

    def _close_if_idle(self, place: int) -> None:
        if not any(place in (job.prefill_place, job.decode_place) for job in self._live.values()):
            self.engines[place].dead = True
            self.caches.clear(place)
            self._close(place)

    def _close(self, place: int) -> None:
        self._leaving.discard(place)
        for proxy in self._proxies:
            proxy.leave(place)

    def _look(self, now_s: float) -> None:
        """Records how loaded prefill and decode are."""
        waits_s = [each.load.wait_s(now_s) for each in self.workers if each.role is not _DECODE]
        gaps_s = [engine.gap_s(now_s) for engine in self.engines if isinstance(engine, WholeEngine)]
        self.loads.add(now_s, sum(waits_s) / max(len(waits_s), 1), sum(gaps_s) / max(len(gaps_s), 1))

    def _engine(self, place: int) -> PrefillEngine | WholeEngine:
        settings = self.settings
        here = Surroundings(settings.machine, self.events, self.caches, self)
        if self._proxies[0].fleet.kind(place) == "prefill":
            chunk_tokens = settings.chunk_tokens or 1 << 31
            return PrefillEngine(place, here, width=settings.width, chunk_tokens=chunk_tokens)
        return WholeEngine(place, here, chunk_tokens=settings.chunk_tokens)
