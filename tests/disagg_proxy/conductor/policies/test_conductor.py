"""The conductor's policy, case by case: each term of its cost decides where it should."""

from __future__ import annotations

import random

import pytest

from moonpool.disagg_proxy.conductor.choice import Choice, Request
from moonpool.disagg_proxy.conductor.inflight import InflightTracker
from moonpool.disagg_proxy.conductor.policies.conductor import TRY_SHARE, Conductor
from moonpool.disagg_proxy.conductor.transfer_backlog import TransferBacklog
from moonpool.disagg_proxy.conductor.worker import Role, Worker
from tests.disagg_proxy.conductor.policies.sending import send

SEED = 20261121
KEYS = {
    "predicted_ttft_s", "predicted_gap_s", "wait_s", "transfer_s", "prefill_s", "handover_s", "prompt_tokens",
    "own_tokens", "pool_tokens", "reason",
}  # fmt: skip


def fleet(count: int, role: Role = Role.BOTH) -> tuple[Worker, ...]:
    instances = tuple(Worker(place, f"e{place}", role) for place in range(count))
    for instance in instances:
        instance.obeys = True
    return instances


def busy(instance: Worker, seconds: float, request: int = 1_000) -> None:
    instance.load.prefill_began(request, 1, 0, 0, seconds, now_s=0.0)


def loaded(instances: tuple[Worker, ...], load: float) -> None:
    """A request a second came to each, for the last minutes."""
    for instance in instances:
        for number in range(-600, 0):
            instance.arrival_rate.add(load, float(number))


def fetches_at(instance: Worker, token_s: float) -> None:
    """It has learnt that a fetched token costs so much, in whichever way."""
    chance = random.Random(SEED)
    for number in range(300):
        tokens = chance.randrange(2_000, 20_000)
        pool = chance.randrange(1_000, tokens) if number % 2 else 0
        computed_s = 0.02 + 1e-4 * (tokens - pool)
        instance.prefill_model.observe(tokens, 0, pool, computed_s + token_s * pool, queued=number % 4 == 1)


def test_why_says_what_was_weighed_and_adds_up() -> None:
    engines = fleet(2)
    busy(engines[0], 0.5)
    busy(engines[1], 0.4)
    choice = Conductor().choose(Request(8_000, (1_000, 2_000), 6_000), engines, 0.0)
    why = choice.why
    assert set(why) == KEYS
    assert (why["own_tokens"], why["pool_tokens"], why["prompt_tokens"]) == (2_000, 4_000, 8_000)
    parts = [float(why[name]) for name in ("wait_s", "transfer_s", "prefill_s", "handover_s")]
    assert sum(parts) == pytest.approx(float(why["predicted_ttft_s"]))
    assert parts[1] > 0
    assert choice.prefill_s == pytest.approx(parts[1] + parts[2])
    model = choice.decode.prefill_model
    assert choice.prefill_s == pytest.approx(model.predict(8_000, 2_000, 4_000, queued=True))
    assert why["reason"] == "least_time"


def test_what_is_not_worth_a_hand_over_goes_to_decode_engines_as_to_whole_ones() -> None:
    """Short prompts, and a long one that a decode engine's own cache or the pool has nearly all of."""
    roles = (Role.PREFILL, Role.DECODE, Role.DECODE, Role.BOTH)
    for request in (Request(100), Request(20_100, (0, 20_000)), Request(20_100, (), 20_000)):
        engines = tuple(Worker(place, f"e{place}", role) for place, role in enumerate(roles))
        busy(engines[3], 120.0)
        choice = Conductor().choose(request, engines, 0.0)
        assert choice.prefill is None
        assert choice.decode.role is Role.DECODE
        assert float(choice.why["predicted_ttft_s"]) < 1
        busy(engines[1], 120.0)
        busy(engines[2], 120.0, request=2_000)
        engines[3].load.prefill_ended(1_000, 0.0)
        assert Conductor().choose(request, engines, 0.0).decode is engines[3]


def test_affinity_grows_with_the_load() -> None:
    """The same match against the same wait: worth it when others come soon, and not when nobody does."""
    request = Request(10_000, (5_000, 0))
    for load, place in ((0.0, 1), (0.9, 0)):
        engines = fleet(2)
        if load:
            loaded(engines, load)
        busy(engines[0], 0.6)
        choice = Conductor().choose(request, engines, 0.0)
        assert choice.decode.place == place, load
        assert choice.why["reason"] == ("spares_others" if place == 0 else "least_time")


def test_of_equal_costs_the_longest_match_is_taken() -> None:
    choice = Conductor().choose(Request(10_000, (5_000, 5_004, 5_000)), fleet(3), 0.0)
    assert (choice.decode.place, choice.why["reason"]) == (1, "match")


def test_a_match_is_no_reason_to_wait_for_ever() -> None:
    engines = fleet(2)
    loaded(engines, 0.9)
    busy(engines[0], 30.0)
    assert Conductor().choose(Request(10_000, (9_000, 0)), engines, 0.0).decode.place == 1


def test_the_urgent_care_less_for_others() -> None:
    request = Request(10_000, (5_000, 0))
    places = []
    for priority in (-4, 0, 4):
        engines = fleet(2)
        loaded(engines, 0.7)
        busy(engines[0], 0.6)
        chosen = Conductor().choose(request._replace(priority=priority), engines, 0.0)
        places.append(chosen.decode.place)
    assert places == [0, 0, 1]


def test_a_fetch_that_takes_longer_than_to_compute_is_not_made() -> None:
    for token_s, fetches in ((1e-6, True), (1e-3, False)):
        engines = fleet(1)
        fetches_at(engines[0], token_s)
        choice = Conductor().choose(Request(10_000, (0,), 9_000), engines, 0.0)
        assert choice.fetch is fetches
        assert (float(choice.why["transfer_s"]) > 0) is fetches
        assert choice.prefill_s == pytest.approx(0.02 + 1e-4 * (1_000 if fetches else 10_000), rel=0.2)


def test_who_fetches_whatever_he_is_told_is_predicted_so() -> None:
    engines = fleet(1)
    fetches_at(engines[0], 1e-3)
    engines[0].obeys = False
    choice = Conductor().choose(Request(10_000, (0,), 9_000), engines, 0.0)
    assert choice.fetch
    assert choice.prefill_s == pytest.approx(9.1, rel=0.2)


def test_a_sender_that_has_much_to_send_is_spared() -> None:
    engines, sender = fleet(1), TransferBacklog()
    request = Request(10_000, (0,), 9_000, holder=sender)
    assert Conductor().choose(request, engines, 0.0).fetch
    sender.asked(60.0, 0.0)
    assert not Conductor().choose(request, engines, 0.0).fetch
    assert Conductor().choose(request, engines, 59.9).fetch  # all of it has left


def test_what_was_directed_to_be_fetched_is_ahead_of_the_next_fetch() -> None:
    engines = fleet(2)
    tracker, policy, sender = InflightTracker(engines), Conductor(), TransferBacklog()
    request = Request(10_000, (0, 0), 9_000, holder=sender)
    choice = send(policy, request, engines)
    tracker.on_dispatch(1, choice, request, streams=True, now_s=0.0)
    alone_s = float(choice.why["transfer_s"])
    assert sender.ahead_s(0.0) == pytest.approx(alone_s)
    second = policy.choose(request, engines, 0.0)
    assert second.decode is not choice.decode
    assert float(second.why["transfer_s"]) == pytest.approx(2 * alone_s)


def test_a_mistaken_refusal_to_fetch_is_found_out() -> None:
    """Once in a while it is tried: a link that became fast is used again."""
    engines = fleet(1)
    fetches_at(engines[0], 1e-3)
    policy, request, fetched = Conductor(), Request(10_000, (0,), 9_000), 0
    for _ in range(6_000):
        choice = send(policy, request, engines)
        fetched += choice.fetch
        pool = 9_000 if choice.fetch else 0
        engines[0].prefill_model.observe(10_000, 0, pool, 0.02 + 1e-4 * (10_000 - pool) + 1e-6 * pool)
    assert fetched > 1_000


def test_tries_of_a_slow_link_cost_little() -> None:
    engines = fleet(1)
    fetches_at(engines[0], 1e-3)
    policy, request, fetched = Conductor(), Request(10_000, (0,), 9_000), 0
    for _ in range(3_000):
        choice = send(policy, request, engines)
        fetched += choice.fetch
        pool = 9_000 if choice.fetch else 0
        engines[0].prefill_model.observe(10_000, 0, pool, 0.02 + 1e-4 * (10_000 - pool) + 1e-3 * pool)
    assert 1 <= fetched * 8.1 <= 3_000 * 1.02 * TRY_SHARE * 1.5


def test_a_copy_costs_the_room_that_it_takes() -> None:
    """Two that are as soon done: the one where fewer tokens have to be stored, though its line is longer."""
    engines = fleet(2)
    request = Request(10_000, (9_000, 0), 9_000)
    policy = Conductor()
    saved_s = 0.0
    for reused in (False, True):
        if reused:
            for _ in range(2_000):
                policy._reuse.observe(10_000, 10_000)
            busy(engines[0], saved_s * 1.2)
        choices = [policy.choose(request, (engine,), 0.0) for engine in engines]
        saved_s = float(choices[1].why["predicted_ttft_s"]) - float(choices[0].why["predicted_ttft_s"])
        assert policy.choose(request, engines, 0.0).decode.place == 0


def test_what_decodes_there_counts_as_it_slows_prompts_down() -> None:
    """Chunks of 512 tokens, each in a step with those that decode."""
    engines, policy = fleet(2), Conductor()
    engines[1].join_kind(engines[:1])
    for number in range(200):
        batch, tokens = number % 40, 500 + 997 * number % 20_000
        engines[0].decode_model.observe(batch + 1, 0, 0.01 + 1e-3 * (batch + 1))
        step_s = engines[0].decode_model.step_s(batch, 0)
        engines[0].prefill_model.observe(tokens, 0, 0, 1e-4 * tokens + tokens / 512 * step_s, step_s=step_s)
    for request in range(40):
        engines[0].load.decode_began(request, 10, 0.0)
    assert policy.choose(Request(8_192), engines, 0.0).decode is engines[1]
    busy(engines[1], 0.7)  # less than 16 steps of 0.05 s
    choice = policy.choose(Request(8_192), engines, 0.0)
    assert choice.decode is engines[1]
    busy(engines[1], 0.3, 1_001)
    choice = policy.choose(Request(8_192), engines, 0.0)
    assert choice.decode is engines[0]
    assert choice.why["predicted_ttft_s"] == pytest.approx(0.82 + 0.8, rel=0.1)


def test_a_session_stays_while_predictions_cannot_tell() -> None:
    engines, policy = fleet(3), Conductor()
    request = Request(2_000, session="s")
    first = send(policy, request, engines).decode
    others = [engine for engine in engines if engine is not first]
    first.load.decode_began(1, 10, 0.0)  # busier by a request, which would be reason enough to go
    assert policy.choose(request._replace(session="t"), engines, 0.0).decode is not first
    choice = policy.choose(request, engines, 0.0)
    assert (choice.decode, choice.why["reason"]) == (first, "session")
    for _ in range(64):  # predictions are off by half
        first.ttft_ratios.observe(1.0, 0.5)
        first.ttft_ratios.observe(1.0, 1.5)
    least_s = float(choice.why["predicted_ttft_s"])
    busy(first, least_s * 0.3)
    assert policy.choose(request, engines, 0.0).decode is first
    busy(first, least_s * 10, request=1_001)
    assert policy.choose(request, engines, 0.0).decode in others


def test_a_session_whose_prompt_is_not_known_goes_where_its_last_one_is() -> None:
    engines, policy = fleet(3), Conductor()
    first = send(policy, Request(8_000, session="s"), engines).decode
    busy(first, first.prefill_model.predict(8_000) * 0.5)
    assert policy.choose(Request(session="s"), engines, 0.0).decode is first
    assert policy.choose(Request(), engines, 0.0).decode is not first


def test_a_conversation_that_was_refused_is_nowhere() -> None:
    engines, policy = fleet(3), Conductor()
    for _ in range(3):
        policy.choose(Request(30_000, session="s"), engines, 0.0)
    assert policy.choose(Request(session="s"), engines, 0.0).why["reason"] == "turn"


def test_what_is_not_sent_neither_saves_nor_spends_time_for_tries() -> None:
    """In overload most decisions are not carried out."""
    engines, policy = fleet(1), Conductor()
    fetches_at(engines[0], 1e-3)
    request = Request(10_000, (0,), 9_000)
    assert not any(policy.choose(request, engines, 0.0).fetch for _ in range(6_000))
    while not policy.choose(request, engines, 0.0).fetch:
        send(policy, request, engines)
    assert all(policy.choose(request, engines, 0.0).fetch for _ in range(100))
    send(policy, request, engines)
    assert not policy.choose(request, engines, 0.0).fetch


def test_a_conversation_of_unknown_length_says_nothing_of_room() -> None:
    engines, policy = fleet(1), Conductor()
    for _ in range(50):
        send(policy, Request(50_000, (25_000,), session="s"), engines)
        chance = policy._reuse.probability
        send(policy, Request(session="s"), engines)
        assert policy._reuse.probability == chance


def test_a_session_whose_engine_left_goes_elsewhere() -> None:
    engines, policy = fleet(2), Conductor()
    first = send(policy, Request(2_000, session="s"), engines).decode
    left = tuple(engine for engine in engines if engine is not first)
    again = Worker(first.place, "new at its place")
    busy(again, 5.0)
    assert policy.choose(Request(2_000, session="s"), (*left, again), 0.0).decode is left[0]


def test_decode_counts_what_is_coming_there() -> None:
    prefill, one, other = Worker(0, "p", Role.PREFILL), *fleet(3, Role.DECODE)[1:]
    tracker, policy, engines = InflightTracker((prefill, one, other)), Conductor(), (prefill, one, other)
    chosen = []
    for number in range(8):
        choice = send(policy, Request(5_000), engines)
        tracker.on_dispatch(number, choice, Request(5_000), streams=True, now_s=0.0)
        chosen.append(choice.decode.place)
    assert chosen.count(1) == chosen.count(2) == 4
    one.room_tokens = 24_000
    assert policy.choose(Request(5_000), engines, 0.0).decode is other
    tracker.expire(1e6)
    assert one.pending_handover == one.pending_handover_tokens == other.pending_handover == 0


def test_random_fleets_get_sound_choices() -> None:
    chance = random.Random(SEED)
    print("seed", SEED)
    for _ in range(300):
        roles = [chance.choice(list(Role)) for _ in range(chance.randrange(1, 9))]
        engines = tuple(Worker(place, str(place), role) for place, role in enumerate(roles))
        for engine in engines:
            engine.obeys = chance.random() < 0.5
            if chance.random() < 0.5:
                busy(engine, chance.random() * 5)
        policy = Conductor()
        for now_s in (0.0, 5.0, -3.0, 1e9):
            tokens = chance.choice((0, 10, 5_000, 200_000))
            own = [chance.randrange(tokens + 1) for _ in engines[: chance.randrange(len(engines) + 1)]]
            choice: Choice = policy.choose(
                Request(
                    tokens,
                    own,
                    chance.randrange(tokens + 1),
                    priority=chance.choice((-99, 0, 99)),
                    session=chance.choice(("", "a", "b")),
                ),
                engines,
                now_s,
            )
            assert choice.computes in engines
            assert choice.prefill_s >= 0
            assert float(choice.why["predicted_ttft_s"]) >= choice.prefill_s


def test_a_short_rest_is_computed_where_others_decode_only_if_their_gaps_allow_it() -> None:
    prefill, decode = Worker(0, "p", Role.PREFILL), Worker(1, "d", Role.DECODE)
    engines = prefill, decode
    for number in range(300):
        decode.prefill_model.observe(100 + number % 7, 0, 0, 0.05)
    asked = Request(100, gap_s=0.04)
    assert Conductor().choose(asked, engines, 0.0).prefill is None  # nobody decodes there
    decode.load.decode_began(1, 1_000, 0.0)
    assert Conductor().choose(asked, engines, 0.0).prefill is prefill
    assert Conductor().choose(asked._replace(gap_s=0.08), engines, 0.0).prefill is None  # 10 ms and 50
    assert Conductor().choose(Request(100), engines, 0.0).prefill is None


def test_short_prompts_are_computed_where_they_are_decoded_while_prefill_engines_are_busy() -> None:
    """If that costs less than the wait, what those that decode there go without counted in."""
    prefill = Worker(0, "p", Role.PREFILL)
    decodes = tuple(Worker(place, f"d{place}", Role.DECODE) for place in (1, 2))
    engines = (prefill, *decodes)

    def computes(request: Request) -> Worker:
        return Conductor().choose(request, engines, 0.0).computes

    asked = Request(1_000)  # 0.12 s
    assert computes(asked) is prefill  # which is idle: decode engines are left alone
    known = Request(8_000, (2_000, 7_000))
    assert computes(known) is decodes[0]
    assert computes(known._replace(pool=7_500)) is prefill  # which would fetch as much
    assert computes(Request(8_000, (6_800, 7_000))) is prefill
    busy(prefill, 1.0)
    assert computes(asked) in decodes
    assert computes(Request(3_000)) is prefill  # 0.33 s
    assert computes(Request(21_000, (0, 0, 20_000))) is decodes[1]
    assert computes(Request(21_000, (), 20_000)) in decodes
    assert computes(Request(0)) is prefill  # nobody knows how long it is

    for request in range(3):
        decodes[0].load.decode_began(request, 100, 0.0)
    assert computes(asked) is decodes[1]
    for request in range(30):
        decodes[1].load.decode_began(request, 100, 0.0)
    assert computes(asked) is decodes[0]  # three wait
    assert computes(asked._replace(gap_s=0.1)) is prefill
    busy(decodes[0], 0.2)
    assert computes(asked) is prefill  # both prompts may come between two tokens
    decodes[0].load.prefill_ended(1_000, 0.0)
    decodes[0].room_tokens = 1_000
    assert computes(asked) is prefill  # thirty would wait
    decodes[0].room_tokens = 0
    for request in range(3, 30):
        decodes[0].load.decode_began(request, 100, 0.0)
    assert computes(asked) is prefill
    busy(prefill, 9.0, request=2_000)
    assert computes(asked) in decodes
    for instance in engines:  # such as meet only each other
        instance.self_sufficient = False
    assert computes(asked) is prefill


@pytest.mark.parametrize("room_tokens", [0, 3_000_500])
def test_a_decode_engine_that_may_not_compute_a_prompt_hides_none_that_may(room_tokens: int) -> None:
    """Few long contexts make it cheap, and its gaps long, or its room small."""
    prefill = Worker(0, "p", Role.PREFILL)
    long, short = (Worker(place, f"d{place}", Role.DECODE, room_tokens=room_tokens) for place in (1, 2))
    busy(prefill, 5.0)
    for request in range(2):
        long.load.decode_began(request, 1_500_000, 0.0)
    for request in range(6):
        short.load.decode_began(request, 100, 0.0)
    asked = Request(300, gap_s=0.3 if room_tokens else 0.1)
    assert long.gap_s(300) + long.prefill_model.predict(300) > 0.1
    assert Conductor().choose(asked, (prefill, long), 0.0).computes is prefill
    assert Conductor().choose(asked, (prefill, long, short), 0.0).computes is short


def pair() -> tuple[Worker, Worker]:
    """Prefill, which is busy for a second, and decode, where nobody is."""
    prefill, decode = Worker(0, "p", Role.PREFILL), Worker(1, "d", Role.DECODE)
    busy(prefill, 1.0)
    return prefill, decode


@pytest.mark.parametrize("stalled", [False, True])
def test_a_prompt_among_those_that_decode_comes_on_top_of_their_gap(stalled: bool) -> None:
    engines = _, decode = pair()
    if stalled:  # by a prompt in the last answer, too: this one is not computed twice
        decode.load.decode_began(1, 100, -3.0)
        decode.load.prefill_began(2, 100, 0, 0, 1.0, -2.0)
        decode.load.prefill_ended(2, -1.0)
        decode.load.decode_ended(1, 2, 0.0)
        assert decode.load.stall_s(0.0) == 1.0
    prompt_s, gap_s = decode.prefill_model.predict(1_000), decode.gap_s(1_000)
    for share, place in ((0.9, 0), (1.1, 1)):
        asked = Request(1_000, gap_s=prompt_s + share * gap_s)
        assert Conductor().choose(asked, engines, 0.0).computes.place == place, share


@pytest.mark.parametrize(("answer", "coming"), [(1, 0), (1_000, 0), (1, 1_000)])
def test_a_prompt_is_computed_where_it_is_decoded_if_its_answer_and_what_comes_fit_there(
    answer: int, coming: int
) -> None:
    engines = _, decode = pair()
    decode.pending_handover_tokens = coming
    asked = Request(1_000, answer_tokens=answer)
    for more, place in ((-100, 0), (100, 1)):
        decode.room_tokens = 1_000 + answer + coming + more
        assert Conductor().choose(asked, engines, 0.0).computes.place == place, more


def test_what_the_pool_holds_counts_for_prefill_only_if_it_would_be_fetched() -> None:
    prefill, *decodes = fleet(2, Role.DECODE)
    prefill.role = Role.PREFILL
    request = Request(8_000, (2_000, 7_000), 7_500)
    for token_s, place in ((1e-6, 0), (1e-3, 1)):
        fetches_at(prefill, token_s)
        assert Conductor().choose(request, (prefill, *decodes), 0.0).computes.place == place, token_s


def test_why_says_whether_prefill_was_busy_or_decode_had_more() -> None:
    prefill, decode = Worker(0, "p", Role.PREFILL), Worker(1, "d", Role.DECODE)
    request = Request(8_000, (2_000, 7_000))
    for reason in ("only", "prefill_busy"):
        choice = Conductor().choose(request, (prefill, decode), 0.0)
        assert (choice.computes, choice.why["reason"]) == (decode, reason)
        busy(prefill, 1.0)


@pytest.mark.parametrize("priority", [-4, 0, 4])
def test_a_hand_over_is_worth_the_same_wait_to_the_urgent_and_to_others(priority: int) -> None:
    """It is the request's own time, as the wait is."""
    request = Request(8_000, priority=priority)
    for share, place in ((0.5, 2), (2.0, 0)):
        roles = (Role.PREFILL, Role.DECODE, Role.BOTH)
        engines = tuple(Worker(place, f"e{place}", role) for place, role in enumerate(roles))
        busy(engines[2], share * engines[1].handover_model.predict(8_000))
        assert Conductor().choose(request, engines, 0.0).computes.place == place, share


def test_of_whole_engines_beside_one_for_prefill_those_are_spared_where_many_decode() -> None:
    roles = (Role.PREFILL, Role.BOTH, Role.BOTH)
    engines = tuple(Worker(place, f"e{place}", role) for place, role in enumerate(roles))
    busy(engines[0], 60.0)
    busy(engines[1], 0.1)
    for request in range(10):
        engines[2].load.decode_began(request, 100, 0.0)
    assert Conductor().choose(Request(8_000), engines, 0.0).computes is engines[1]
