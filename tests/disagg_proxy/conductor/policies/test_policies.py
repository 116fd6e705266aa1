"""Policies by cases, and beside each other on a small simulated fleet."""

from __future__ import annotations

import heapq
import random
import statistics
from collections import Counter
from collections.abc import Iterator
from itertools import combinations

import pytest

from moonpool.disagg_proxy.conductor.choice import Choice, Request
from moonpool.disagg_proxy.conductor.inflight import InflightTracker
from moonpool.disagg_proxy.conductor.policies.conductor import Conductor
from moonpool.disagg_proxy.conductor.policies.least_load import LeastLoad
from moonpool.disagg_proxy.conductor.policies.prefix_affinity import BUSIER_MAX, PrefixAffinity
from moonpool.disagg_proxy.conductor.policies.roles import Groups
from moonpool.disagg_proxy.conductor.policies.round_robin import RoundRobin
from moonpool.disagg_proxy.conductor.policy import POLICIES, Policy, hook_of, make_policy
from moonpool.disagg_proxy.conductor.worker import Role, Worker
from tests.disagg_proxy.conductor.policies.sending import send


def fleet(both: int = 0, prefill: int = 0, decode: int = 0) -> list[Worker]:
    roles = [Role.BOTH] * both + [Role.PREFILL] * prefill + [Role.DECODE] * decode
    return [Worker(place, f"e{place}", role) for place, role in enumerate(roles)]


def busy(instance: Worker, seconds: float, request: int = 1000) -> None:
    instance.load.prefill_began(request + instance.place, 1, 0, 0, seconds, now_s=0.0)


# ---- round robin


def test_round_robin_takes_each_in_its_turn_while_others_come_and_go() -> None:
    policy, engines = RoundRobin(), fleet(both=3)
    assert [send(policy, Request(), engines).decode.place for _ in range(4)] == [0, 1, 2, 0]
    assert send(policy, Request(), engines[::2]).decode.place == 2  # the other's turn is not over by that
    assert [send(policy, Request(), engines).decode.place for _ in range(4)] == [1, 0, 2, 1]


def test_round_robin_is_fair_to_the_engines_of_each_model() -> None:
    """Requests for two models by turns: neither's turn begins the other's anew."""
    policy, engines = RoundRobin(), fleet(both=4)
    choices = [send(policy, Request(), engines[start : start + 2]) for start in (0, 2) * 10]
    assert Counter(choice.decode.place for choice in choices) == {0: 5, 1: 5, 2: 5, 3: 5}
    apart = [Worker(place, f"e{place}", role) for place, role in enumerate([Role.PREFILL, Role.DECODE] * 4)]
    choices = [send(policy, Request(), apart[start : start + 4]) for start in (0, 4) * 10]
    assert Counter(choice.decode.place for choice in choices) == {1: 5, 3: 5, 5: 5, 7: 5}
    assert Counter(choice.computes.place for choice in choices) == {0: 5, 2: 5, 4: 5, 6: 5}


def test_round_robin_is_fair_over_every_subset() -> None:
    engines = fleet(both=4)
    for size in (1, 2, 3, 4):
        for subset in combinations(engines, size):
            policy = RoundRobin()
            places = [send(policy, Request(), subset).decode.place for _ in range(size * 2)]
            assert places == [each.place for each in subset] * 2


def test_round_robin_has_a_turn_for_each_role() -> None:
    policy, engines = RoundRobin(), fleet(prefill=2, decode=3)
    pairs = [send(policy, Request(), engines) for _ in range(6)]
    assert [each.decode.place for each in pairs] == [2, 3, 4, 2, 3, 4]
    assert [each.prefill.place for each in pairs if each.prefill] == [0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize(
    ("roles", "kin"),
    [
        ("pddw", "0000"),
        ("wpdd", "0000"),
        ("ppdddw", "000000"),
        ("pwdwdd", "000000"),
        ("pppdd", "10010"),
        ("pppddd", "110001"),
        ("pppppdddww", "1100010000"),
    ],
)
def test_round_robin_leaves_nobody_out(roles: str, kin: str) -> None:
    """Who computes a prompt whole takes no decode engine's turn, and one kind's turn is not the other's."""
    policy, engines = RoundRobin(), fleet_of(roles, kin=kin)
    computing = sum(each in "pw" for each in roles)
    choices = [send(policy, Request(), engines) for _ in range(12 * computing)]
    computed = Counter(choice.computes for choice in choices)
    assert set(computed.values()) == {12}
    assert len(computed) == computing
    pairs = [choice for choice in choices if choice.prefill is not None]
    assert all(
        choice.prefill.self_sufficient is choice.decode.self_sufficient for choice in pairs if choice.prefill
    )
    for kind in (False, True):
        decoded = Counter(choice.decode for choice in pairs if choice.decode.self_sufficient is kind)
        assert set(decoded) == {
            each for each in engines if each.role is Role.DECODE and each.self_sufficient is kind
        }
        assert not decoded or max(decoded.values()) - min(decoded.values()) <= 1


# ---- all of them


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_roles_are_kept_in_every_fleet(name: str) -> None:
    for both, prefill, decode in (
        (1, 0, 0),
        (3, 0, 0),
        (0, 1, 1),
        (0, 2, 3),
        (1, 1, 1),
        (0, 2, 0),
        (0, 0, 2),
    ):
        engines, policy = fleet(both, prefill, decode), make_policy(name)
        for tokens in (0, 10, 10_000):
            choice = policy.choose(Request(tokens=tokens), engines, 0.0)
            assert choice.decode in engines
            if both or decode:
                assert choice.decode.role is not Role.PREFILL
            if choice.prefill is not None:
                assert choice.prefill is not choice.decode
                assert choice.prefill.role is Role.PREFILL
            if prefill and decode and not both and tokens == 10_000:
                assert choice.prefill is not None


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_prefill_engine_beside_whole_ones_takes_its_share_and_no_more(name: str) -> None:
    """Equal prompts, none of which ends: all that compute get some, and whole ones serve theirs alone."""
    engines, policy = fleet(both=3, prefill=1), make_policy(name)
    tracker = InflightTracker(engines)
    computed = dict.fromkeys(range(4), 0)
    for number in range(40):
        request = Request(tokens=10_000)
        choice = policy.choose(request, tracker.workers, number * 0.1)
        hook_of(policy)(request, choice, number * 0.1)
        tracker.on_dispatch(number, choice, request, streams=True, now_s=number * 0.1)
        computed[choice.computes.place] += 1
        assert (choice.prefill is None) == (choice.computes.role is Role.BOTH)
    assert min(computed.values()) >= 5
    assert max(computed.values()) <= 20


def fleet_of(roles: str, *, kin: str = "") -> tuple[Worker, ...]:
    """A letter each: p, d, w (whole); kin: a digit each, 1 for SGLang's: its p and d answer nothing alone."""
    names = {"p": Role.PREFILL, "d": Role.DECODE, "w": Role.BOTH}
    engines = tuple(Worker(place, f"{role}{place}", names[role]) for place, role in enumerate(roles))
    for engine, kind in zip(engines, kin, strict=False):
        engine.self_sufficient = kind == "0" or engine.role is Role.BOTH
    return engines


def sent_where(name: str, engines: tuple[Worker, ...], count: int = 40) -> set[tuple[str, str]]:
    """(who computes, who answers) of long prompts, none of which ends."""
    policy, tracker, found = make_policy(name), InflightTracker(engines), set()
    for number in range(count):
        request = Request(tokens=10_000)
        choice = send(policy, request, tracker.workers, number * 0.1)
        tracker.on_dispatch(number, choice, request, streams=True, now_s=number * 0.1)
        found.add((choice.computes.name, choice.decode.name))
    return found


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_without_a_prefill_engine_decode_engines_serve_beside_whole_ones(name: str) -> None:
    assert sent_where(name, fleet_of("dddw")) == {(each, each) for each in ("d0", "d1", "d2", "w3")}


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_only_those_are_asked_that_can_meet_or_need_not(name: str) -> None:
    """SGLang's prefill engines meet SGLang's decode engines, and nobody else does."""
    served = sent_where(name, fleet_of("ppddww", kin="111111"))
    assert {computes for computes, _ in served} == {"p0", "p1", "w4", "w5"}
    assert all((computes[0] == "p") == (decode[0] == "d") for computes, decode in served)
    assert sent_where(name, fleet_of("dddw", kin="1111")) == {("w3", "w3")}
    assert sent_where(name, fleet_of("pw", kin="11")) == {("w1", "w1")}
    assert sent_where(name, fleet_of("pd", kin="10")) == {("d1", "d1")}
    assert sent_where(name, fleet_of("pp", kin="10")) == {("p1", "p1")}
    assert sent_where(name, fleet_of("pdd", kin="110")) == {("p0", "d1"), ("d2", "d2")}
    two_kinds = sent_where(name, fleet_of("ppdd", kin="1010"))
    assert two_kinds <= {("p0", "d2"), ("p1", "d3")}


@pytest.mark.parametrize(
    ("roles", "kin", "whole", "decoding"),
    [
        ("pdw", "", ["w2"], ["d1"]),
        ("pdd", "110", ["d2"], []),
        ("ppddw", "01010", ["w4"], ["d2"]),
        ("dw", "", ["d0", "w1"], []),
    ],
)
def test_a_decode_engine_that_meets_no_prefill_engine_is_weighed_as_a_whole_one(
    roles: str, kin: str, whole: list[str], decoding: list[str]
) -> None:
    """And only so: none is weighed twice."""
    groups = Groups.of(fleet_of(roles, kin=kin))
    assert [each.name for each in groups.whole] == whole
    assert [each.name for each in groups.decoding] == decoding


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_where_nobody_can_serve_somebody_is_named_who_says_why(name: str) -> None:
    assert sent_where(name, fleet_of("pd", kin="01"), 1) == {("p0", "d1")}
    assert sent_where(name, fleet_of("d", kin="1"), 1) == {("d0", "d0")}


@pytest.mark.parametrize(("name", "most"), [("least_load", 1), ("prefix_affinity", 3)])
def test_whole_engines_are_looked_at_once(name: str, most: int) -> None:
    """The least busy, who is near it, and of those the best."""
    asked = []

    def load() -> int:
        asked.append(1)
        return 0

    engines = tuple(Worker(place, f"w{place}", relay_requests=load) for place in range(100))
    make_policy(name).choose(Request(tokens=1_000), engines, 0.0)
    assert len(asked) <= most * 100 + 1


def test_a_prompt_is_computed_apart_when_that_costs_less() -> None:
    """A whole engine that decodes for many stalls them all; an idle one needs no hand-over."""
    engines, policy, request = fleet(both=1, prefill=1, decode=1), Conductor(), Request(tokens=10_000)
    assert policy.choose(request, engines, 0.0).prefill is None
    for number in range(5):
        engines[0].load.decode_began(number, 1_000, 0.0)
    apart = policy.choose(request, engines, 0.0)
    assert (apart.prefill, apart.decode) == (engines[1], engines[2])
    busy(engines[1], 20.0)
    assert policy.choose(request, engines, 0.0).decode is engines[0]


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_what_was_asked_and_not_sent_changes_no_choice(name: str, rng: random.Random) -> None:
    """Two that are told of the same requests choose alike, though one is asked far more often."""
    for both, prefill, decode in ((4, 0, 0), (1, 3, 3), (0, 3, 0)):
        twins = [(make_policy(name), fleet(both, prefill, decode)) for _ in range(2)]

        def some_request(size: int) -> Request:
            tokens = rng.choice((0, 100, rng.randrange(1, 30_000)))
            own = tuple(rng.randrange(tokens + 1) for _ in range(size))
            pool = rng.randrange(tokens + 1)
            return Request(tokens, own, pool, session=rng.choice(("", "a", "b")), priority=rng.randrange(2))

        for number in range(60):
            now_s, size = 0.1 * number, both + prefill + decode
            for _ in range(rng.randrange(4)):  # refused, or waits
                twins[0][0].choose(some_request(size), twins[0][1], now_s)
            request = some_request(size)
            first, second = (send(policy, request, engines, now_s) for policy, engines in twins)
            assert (first.decode.place, first.computes.place) == (second.decode.place, second.computes.place)
            assert (first.why, first.fetch) == (second.why, second.fetch)
            if number % 7 == 0:
                for _, engines in twins:
                    busy(engines[first.computes.place], 0.05, request=1_000 * number)


@pytest.mark.parametrize("name", ["prefix_affinity", "conductor"])
def test_a_short_rest_is_computed_where_it_is_decoded(name: str) -> None:
    engines = fleet(prefill=1, decode=1)
    assert make_policy(name).choose(Request(tokens=100), engines, 0.0).prefill is None
    cached = Request(tokens=5_000, own=(0, 4_900))
    assert make_policy(name).choose(cached, engines, 0.0).prefill is None
    assert make_policy(name).choose(Request(tokens=5_000), engines, 0.0).prefill is engines[0]


RIVALS = ["dynamo_cost", "lmetric", "load_balancing", "min_ttft", "sglang_cache_aware", "vllm_kv_aware"]


@pytest.mark.parametrize("name", ["conductor", *RIVALS])
def test_decode_counts_those_whose_prompts_are_being_computed(name: str) -> None:
    """While the first one's is, the next answer is made elsewhere, also by another policy's turn."""
    engines = fleet(prefill=2, decode=2)
    tracker, request = InflightTracker(engines), Request(5_000)
    first = make_policy(name).choose(request, engines, 0.0)
    tracker.on_dispatch(1, first, request, streams=True, now_s=0.0)
    assert make_policy(name).choose(request, engines, 0.0).decode is not first.decode


# ---- each


def test_least_load_takes_the_fewest_requests_and_turns_among_equals() -> None:
    policy, engines = LeastLoad(), fleet(both=3)
    busy(engines[0], 1.0)
    assert [send(policy, Request(), engines).decode.place for _ in range(4)] == [1, 2, 1, 2]


def test_affinity_stays_until_the_place_is_too_busy() -> None:
    policy, engines = PrefixAffinity(), fleet(both=2)
    request = Request(tokens=1_000, own=(0, 900))
    for number in range(BUSIER_MAX + 1):
        assert policy.choose(request, engines, 0.0).decode.place == 1
        busy(engines[1], 0.1, request=10 * number)
    assert policy.choose(request, engines, 0.0).decode.place == 0


def test_conductor_weighs_a_match_against_the_wait() -> None:
    policy, engines = Conductor(), fleet(both=2)
    request = Request(tokens=10_000, own=(0, 9_000))
    assert policy.choose(request, engines, 0.0).decode.place == 1
    saved_s = engines[0].prefill_model.predict(10_000) - engines[0].prefill_model.predict(10_000, 9_000)
    busy(engines[1], saved_s * 0.9)
    assert policy.choose(request, engines, 0.0).decode.place == 1
    busy(engines[1], saved_s * 0.2, request=2000)
    assert policy.choose(request, engines, 0.0).decode.place == 0


def test_with_a_pool_the_wait_decides_rather_than_the_place() -> None:
    policy, engines = Conductor(), fleet(both=2)
    busy(engines[1], 0.2)
    request = Request(tokens=10_000, own=(0, 9_000), pool=9_000)
    choice = policy.choose(request, engines, 0.0)
    assert choice.decode.place == 0
    assert choice.why["pool_tokens"] == 9_000


def test_equal_times_are_decided_by_the_match_then_by_requests() -> None:
    policy, engines = Conductor(), fleet(both=3)
    engines[0].load.decode_began(1, 10, 0.0)
    assert policy.choose(Request(tokens=500), engines, 0.0).decode.place == 1


def test_decode_goes_where_there_is_room_and_the_gap_is_least() -> None:
    policy, engines = Conductor(), fleet(prefill=1, decode=3)
    engines[1].room_tokens = 4_000
    engines[2].load.decode_began(1, 50_000, 0.0)
    choice = policy.choose(Request(tokens=5_000), engines, 0.0)
    assert choice.decode.place == 3  # 1 has no room, 2 is slower
    engines[3].room_tokens = engines[2].room_tokens = 100
    assert policy.choose(Request(tokens=5_000), engines, 0.0).decode.place == 1  # nobody has: the fastest


# ---- beside each other: engines that prefill one after the other, each with a cache of its own


class SmallFleet:
    """Engines that compute prompts one at a time; a session's prompt grows with each turn."""

    def __init__(self, policy: Policy, seed: int, *, engines: int = 4) -> None:
        self.policy = policy
        self.random = random.Random(seed)
        self.workers = fleet(both=engines)
        self.caches: list[dict[int, int]] = [{} for _ in range(engines)]
        self.free_s = [0.0] * engines
        self.ends: list[tuple[float, int, int]] = []

    def arrivals(self, count: int) -> Iterator[tuple[float, int, int]]:
        now_s, lengths = 0.0, dict.fromkeys(range(24), 2000)
        for _ in range(count):
            now_s += self.random.expovariate(24.0)
            session = min(int(self.random.expovariate(0.15)), 23)
            lengths[session] = min(lengths[session] + self.random.randrange(200, 1_200), 24_000)
            yield now_s, session, lengths[session]

    @staticmethod
    def prefill_s(tokens: int, own: int) -> float:
        return 0.03 + 1.1e-4 * (tokens - own) + 7e-10 * (tokens**2 - own**2)

    def run(self, count: int = 1_500) -> float:
        """Mean seconds to the first token."""
        waits = []
        for number, (now_s, session, tokens) in enumerate(self.arrivals(count)):
            while self.ends and self.ends[0][0] <= now_s:
                end_s, place, request = heapq.heappop(self.ends)
                self._ended(end_s, place, request)
            own = [cache.get(session, 0) for cache in self.caches]
            choice = send(self.policy, Request(tokens=tokens, own=own), self.workers, now_s)
            waits.append(self._sent(choice, number, session, tokens, own, now_s) - now_s)
        for instance in self.workers:
            instance.check_integrity()
        return statistics.fmean(waits)

    def _sent(
        self, choice: Choice, number: int, session: int, tokens: int, own: list[int], now_s: float
    ) -> float:
        place = choice.decode.place
        predicted_s = choice.prefill_s or choice.decode.prefill_model.predict(tokens, own[place])
        choice.decode.load.prefill_began(number, tokens, own[place], 0, predicted_s, now_s)
        begin_s = max(now_s, self.free_s[place])
        self.free_s[place] = begin_s + self.prefill_s(tokens, own[place])
        self.caches[place][session] = tokens
        heapq.heappush(self.ends, (self.free_s[place], place, number))
        return self.free_s[place]

    def _ended(self, end_s: float, place: int, request: int) -> None:
        instance = self.workers[place]
        done = instance.load.prefill_ended(request, end_s)
        if done is not None:
            instance.prefill_model.observe(done.tokens, done.own, done.pool, done.seconds)


def test_knowing_more_serves_sooner() -> None:
    """Round robin, then the fewest requests, then affinity; the conductor before all of them."""
    means = {
        name: statistics.fmean(SmallFleet(make_policy(name), seed).run() for seed in (1, 2, 3))
        for name in POLICIES
    }
    print("seeds 1, 2, 3:", {name: round(mean, 3) for name, mean in means.items()})
    assert means["conductor"] < 0.8 * means["round_robin"]
    assert means["conductor"] < 0.95 * means["prefix_affinity"]
    assert means["conductor"] < 0.9 * means["least_load"]
