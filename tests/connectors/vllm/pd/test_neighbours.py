"""Blocks of other engines' own caches, without engines: what is asked and answered, the leases, and what a
request makes of an offer."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from moonpool.connectors.vllm import compat
from moonpool.connectors.vllm.messages import Report
from moonpool.connectors.vllm.metrics import Tally
from moonpool.connectors.vllm.pd.bootstrap import Bootstrap
from moonpool.connectors.vllm.pd.consumer_scheduler import ConsumerScheduler
from moonpool.connectors.vllm.pd.handover import SURPLUS_TOKENS_MIN, is_worth
from moonpool.connectors.vllm.pd.kv_transfer_params import Offer, Unusable, answer_of
from moonpool.connectors.vllm.pd.neighbour_asks import (
    ASK_BYTES_MAX,
    PATH,
    Ask,
    Neighbour,
    decode_ask,
    digest_of,
    encode_ask,
    read_answer,
    read_neighbour,
)
from moonpool.connectors.vllm.pd.neighbour_offers import (
    LENT_BLOCKS_SHARE,
    LENT_LEASES_MAX,
    NOTHING,
    NeighbourOffers,
)
from moonpool.connectors.vllm.pd.neighbour_queries import REST_S, NeighbourQueries
from moonpool.connectors.vllm.pd.producer_scheduler import Identity, ProducerScheduler
from moonpool.connectors.vllm.pd.producer_worker import ProducerWorker
from moonpool.connectors.vllm.pd.rank_pairs import Sizes
from moonpool.connectors.vllm.pd.wire import Malformed
from moonpool.core.service.addresses import Address
from moonpool.core.service.http_get import exchange
from tests.connectors.vllm.fakes import (
    BLOCK_TOKENS,
    FINGERPRINT,
    LOG,
    Clock,
    FakeBlockPool,
    FakeOutput,
    FakePool,
    FakeRequest,
    FakeStep,
    admit,
    feature,
    first_step,
    scheduler_half,
)

TOKEN = b"secret"
HASHES = [bytes([number]) * 32 for number in range(1, 41)]
IDENTITY = Identity("engine-1", FINGERPRINT, ("127.0.0.1:4000",), 1, BLOCK_TOKENS, TOKEN)
HINT = {"remote_engine_id": "engine-1", "remote_bootstrap_addr": "http://127.0.0.1:8998"}


def ask_for(hashes: list[bytes], **changes: Any) -> Ask:
    fields = {"engine_id": "engine-1", "fingerprint": FINGERPRINT, "algorithm": "sha256", "wait_s": 60.0}
    return Ask(**{**fields, "hashes": hashes, **changes})


# What is asked


def test_an_ask_proves_the_cluster_token() -> None:
    ask = ask_for(HASHES[:3])
    body = encode_ask(ask, TOKEN)
    assert decode_ask(body, TOKEN) == ask
    for wrong in (b"", body[:31], body[:-1], body[:32] + b"x", bytes(32) + body[32:]):
        with pytest.raises(Malformed):
            decode_ask(wrong, TOKEN)
    with pytest.raises(Malformed, match="cluster token"):
        decode_ask(body, b"another secret")


@pytest.mark.parametrize(
    "named",
    [
        None,
        "engine-1",
        {},
        {**HINT, "remote_engine_id": ""},
        {**HINT, "remote_bootstrap_addr": "file:///etc/passwd"},
        {**HINT, "remote_bootstrap_addr": "http://host/path?x"},
    ],
)
def test_what_names_no_engine(named: object) -> None:
    assert read_neighbour({"moonpool": {"cached_at": named}}) is None
    assert read_neighbour({"moonpool": {"cached_at": HINT}}) == Neighbour(**HINT)
    assert read_neighbour(None) is read_neighbour({"moonpool": 1}) is None


# The engine that is asked


class OffersBed:
    """An engine whose blocks 10, 11, ... have the first hashes. asks run on threads, as those of a page."""

    def __init__(self, cached: int = 8, blocks: int = 400, algorithm: str = "sha256") -> None:
        self.clock, self.tally, self.pool = Clock(), Tally(), FakeBlockPool(blocks)
        self.woken = threading.Semaphore(0)
        self.producer = ProducerScheduler(
            IDENTITY, silence_s=10.0, tally=self.tally, log=LOG, clock=self.clock
        )
        self.offers = self.producer.neighbours = NeighbourOffers(
            self.producer,
            IDENTITY,
            algorithm=algorithm,
            wake=self.woken.release,
            tally=self.tally,
            clock=self.clock,
        )
        self.producer.bind(self.pool)
        for number in range(cached):
            self.pool.blocks[10 + number].block_hash = HASHES[number]
        self.slots: dict[int, int] = {}
        self.worker = ProducerWorker(self.slots.__setitem__, silence_s=10.0)

    def ask(self, ask: Ask) -> Callable[[], Offer | None]:
        """Returns when the ask waits for a step. The result gives what came of it."""
        body, answers = encode_ask(ask, TOKEN), list[bytes]()
        thread = threading.Thread(target=lambda: answers.append(self.offers.ask(body)), daemon=True)
        thread.start()
        assert self.woken.acquire(timeout=60)

        def answer() -> Offer | None:
            thread.join(60)
            return read_answer(answers[0], ask, body, TOKEN)

        return answer

    def step(self) -> None:
        """Plans a step, which the workers carry out; the scheduler hears of it."""
        step = self.producer.plan(FakeStep())  # type: ignore[arg-type]
        self.worker.begin(step.opens, step.ends)
        self.producer.heartbeats(*self.worker.take_heartbeats())
        assert self.producer.leases.check_integrity()

    def take(self, ask: Ask) -> Offer | None:
        answer = self.ask(ask)
        self.step()
        return answer()


def test_leading_blocks_that_are_there_are_offered_under_a_lease() -> None:
    bed = OffersBed(cached=5)
    offer = bed.take(ask_for(HASHES[2:9]))
    assert offer is not None
    assert offer.blocks == ((12, 13, 14),)
    assert (offer.tokens, offer.fingerprint) == (3 * BLOCK_TOKENS, FINGERPRINT)
    assert bed.slots[offer.slot] == offer.lease
    assert bed.pool.held() == [12, 13, 14]
    assert bed.producer.has_work
    bed.producer.heartbeats(set(), {offer.lease: 1})
    assert bed.pool.held() == []
    assert bed.producer.is_idle


def test_no_answer_goes_out_before_the_workers_have_the_lease() -> None:
    """Nor before the steps are computed whose blocks vLLM has named already."""
    bed = OffersBed()
    answer = bed.ask(ask_for(HASHES[:2]))
    step = bed.producer.plan(FakeStep())  # type: ignore[arg-type]
    assert (len(step.opens), step.opens[0].confirms, bed.offers.answered) == (1, True, 0)
    bed.producer.heartbeats(set(), {})
    assert bed.offers.answered == 0
    bed.producer.heartbeats({step.opens[0].lease}, {})
    assert answer() is not None


@pytest.mark.parametrize(
    "changes",
    [
        {"fingerprint": bytes(32)},
        {"engine_id": "engine-2"},
        {"algorithm": "sha256_cbor"},
        {"hashes": [b"another salt's"]},
        {"hashes": [b"evicted", *HASHES]},
    ],
)
def test_of_other_models_salts_and_engines_nothing_is_offered(changes: dict[str, Any]) -> None:
    bed = OffersBed()
    assert bed.take(ask_for(**{"hashes": HASHES[:4], **changes})) is None
    assert bed.pool.held() == []
    assert bed.producer.is_idle


def test_an_engine_whose_hashes_others_cannot_use_offers_nothing() -> None:
    assert OffersBed(algorithm="").take(ask_for(HASHES[:4], algorithm="xxhash")) is None


def test_a_bounded_share_of_the_blocks_is_kept_for_others() -> None:
    bed = OffersBed(cached=30, blocks=10 * LENT_BLOCKS_SHARE)
    first, second, third = (bed.take(ask_for(HASHES[:count])) for count in (7, 30, 30))
    assert first is not None
    assert second is not None
    assert [len(offer.blocks[0]) for offer in (first, second)] == [7, 3]
    assert third is None
    bed.producer.heartbeats(set(), {first.lease: 1})
    again = bed.take(ask_for(HASHES[:30]))
    assert again is not None
    assert len(again.blocks[0]) == 7


def test_a_bounded_number_of_leases_is_kept_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recorded ask for one block, repeated, leaves slots for hand-overs; and it costs no look at blocks."""
    bed = OffersBed(cached=1, blocks=8 * LENT_BLOCKS_SHARE * LENT_LEASES_MAX)
    offers = [bed.take(ask_for(HASHES[:1])) for _ in range(LENT_LEASES_MAX)]
    assert None not in offers
    monkeypatch.setattr(bed.pool, "get_cached_block", None)
    assert bed.take(ask_for(HASHES[:1])) is None
    monkeypatch.undo()
    assert offers[0] is not None
    bed.producer.heartbeats(set(), {offers[0].lease: 1})
    assert bed.take(ask_for(HASHES[:1])) is not None


def test_without_a_slot_no_block_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    bed = OffersBed()
    while bed.producer.leases.open():
        pass
    monkeypatch.setattr(bed.pool, "get_cached_block", None)
    assert bed.take(ask_for(HASHES[:4])) is None


def test_an_engine_that_lacks_blocks_takes_them_back_at_once() -> None:
    bed = OffersBed()
    offer = bed.take(ask_for(HASHES[:4]))
    assert offer is not None
    waiting = bed.ask(ask_for(HASHES[:4]))
    assert bed.offers.revoke()
    assert waiting() is None
    bed.step()
    assert bed.slots[offer.slot] == 0
    assert bed.pool.held() == []
    assert not bed.offers.revoke()


def test_a_taker_that_is_silent_loses_its_blocks() -> None:
    bed = OffersBed()
    offer = bed.take(ask_for(HASHES[:4]))
    assert offer is not None
    bed.clock.now_s += 10.0
    bed.step()
    assert (bed.slots[offer.slot], bed.pool.held()) == (0, [])


def test_a_taker_that_left_before_its_answer_leaves_no_lease() -> None:
    bed = OffersBed()
    answer = bed.ask(ask_for(HASHES[:4], wait_s=0.0))
    assert answer() is None
    bed.step()
    bed.step()
    assert bed.pool.held() == []
    assert bed.producer.is_idle


def test_what_was_computed_before_a_change_of_weights_is_not_offered() -> None:
    bed = OffersBed()
    offer = bed.take(ask_for(HASHES[:4]))
    waiting = bed.ask(ask_for(HASHES[:4]))
    bed.producer.forget_all()
    assert offer is not None
    assert waiting() is None
    bed.step()
    assert bed.slots[offer.slot] == 0
    assert bed.pool.held() == []


def test_an_engine_whose_weights_may_be_others_offers_nothing_any_more() -> None:
    bed = OffersBed()
    offer = bed.take(ask_for(HASHES[:4]))
    assert offer is not None
    bed.offers.stop()
    bed.step()
    assert (bed.slots[offer.slot], bed.pool.held()) == (0, [])
    ask = ask_for(HASHES[:4])
    body = encode_ask(ask, TOKEN)
    assert read_answer(bed.offers.ask(body), ask, body, TOKEN) is None


# The page


@pytest.fixture
def page() -> Iterator[tuple[str, list[bytes]]]:
    asked: list[bytes] = []

    def answer(body: bytes) -> bytes:
        asked.append(body)
        if body == b"forged":
            raise Malformed("it is")
        return b'{"a":1}'

    made = Bootstrap(
        Address("127.0.0.1", 0), dp_rank=0, engine_id="e", workers={}, answer_ask=answer, takes_cached=True
    )
    yield f"http://{made.address}", asked
    made.close()


def test_the_page_takes_asks(page: tuple[str, list[bytes]]) -> None:
    url, asked = page
    assert msgspec.json.decode(exchange("GET", url + "/query", timeout_s=60).body)["0"]["cached"] is True
    assert exchange("POST", url + PATH, body=b"ask", timeout_s=60)[::2] == (200, b'{"a":1}')
    assert exchange("POST", url + PATH, body=b"forged", timeout_s=60).status == 403
    assert exchange("POST", url + "/query", body=b"ask", timeout_s=60).status == 404
    for length in (str(ASK_BYTES_MAX + 1), "9" * 5000, "", "-1"):
        connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
        connection.putrequest("POST", PATH)
        connection.putheader("Content-Length", length)
        connection.endheaders()
        assert connection.getresponse().status == 413
        connection.close()
    assert asked == [b"ask", b"forged"]


def test_the_page_of_an_engine_that_offers_nothing() -> None:
    made = Bootstrap(Address("127.0.0.1", 0), dp_rank=0, engine_id="e", workers={})
    try:
        url = f"http://{made.address}"
        read = exchange("GET", url + "/query", timeout_s=60).body
        assert "cached" not in msgspec.json.decode(read)["0"]
        assert exchange("POST", url + PATH, body=b"ask", timeout_s=60).status == 404
    finally:
        made.close()


# The engine that asks


def offer_of(ask: Ask, body: bytes, count: int, **changes: Any) -> Offer:
    fields: dict[str, Any] = {
        "engine_id": "engine-1",
        "ranks": IDENTITY.ranks,
        "lease": 77,
        "slot": 3,
        "blocks": (tuple(range(30, 30 + count)),),
        "tokens": count * BLOCK_TOKENS,
        "fingerprint": ask.fingerprint,
        "prompt": digest_of(body),
        "tp_size": 1,
    }
    return Offer(**{**fields, **changes})


def answer_bytes(offer: Offer, token: bytes = TOKEN) -> bytes:
    return msgspec.json.encode(answer_of(offer, token, request_id=""))


def test_only_an_answer_to_this_ask_counts() -> None:
    ask = ask_for(HASHES[:4])
    body = encode_ask(ask, TOKEN)
    assert read_answer(NOTHING, ask, body, TOKEN) is None
    assert read_answer(answer_bytes(offer_of(ask, body, 4)), ask, body, TOKEN) is not None
    wrong = [
        b"",
        b"[]",
        answer_bytes(offer_of(ask, body, 4), b"another secret"),
        answer_bytes(offer_of(ask, body + b"x", 4)),
        answer_bytes(offer_of(ask, body, 4, engine_id="engine-2")),
        answer_bytes(offer_of(ask, body, 4, fingerprint=bytes(32))),
        answer_bytes(offer_of(ask, body, 5)),
        answer_bytes(offer_of(ask, body, 4, blocks=((), ()))),
    ]
    for answer in wrong:
        with pytest.raises(Unusable):
            read_answer(answer, ask, body, TOKEN)


class QueriesBed:
    """Queries whose asks end when ``run`` is called. Prompts are short: a few tokens are a surplus.

    blocks, status: what the neighbour answers.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock, self.tally = Clock(), Tally()
        self.pending: list[Callable[[], None]] = []
        self.asked: list[Ask] = []
        self.blocks = 4
        self.status = 200
        self.queries = NeighbourQueries(
            engine_id="own",
            fingerprint=FINGERPRINT,
            algorithm="sha256",
            token=TOKEN,
            wait_s_max=1.0,
            tally=self.tally,
            clock=self.clock,
            start=self.pending.append,
        )

        def answer(method: str, url: str, *, body: bytes, timeout_s: float) -> Any:
            assert (method, url) == ("POST", HINT["remote_bootstrap_addr"] + PATH)
            self.asked.append(decode_ask(body, TOKEN))
            ask = self.asked[-1]
            text = answer_bytes(offer_of(ask, body, self.blocks)) if self.blocks else NOTHING
            return type("Answer", (), {"status": self.status, "body": text})

        monkeypatch.setattr("moonpool.connectors.vllm.pd.neighbour_queries.exchange", answer)
        monkeypatch.setattr("moonpool.connectors.vllm.pd.handover.SURPLUS_TOKENS_MIN", BLOCK_TOKENS)

    def run(self) -> None:
        while self.pending:
            self.pending.pop(0)()


@pytest.fixture
def asks(monkeypatch: pytest.MonkeyPatch) -> QueriesBed:
    return QueriesBed(monkeypatch)


def test_a_request_waits_for_an_answer_and_not_for_long(asks: QueriesBed) -> None:
    queries = asks.queries
    assert queries.begin("r", Neighbour(**HINT), 2, HASHES[:6], 0.25)
    assert queries.poll("r") is None
    asks.run()
    query = queries.poll("r")
    assert query is not None
    assert query.offer is not None
    assert (query.first, asks.asked[0].hashes, queries.under_way) == (2, HASHES[:6], 0)

    assert queries.begin("slow", Neighbour(**HINT), 0, HASHES[:6], 1.0)
    asks.clock.now_s += 1.0
    late = queries.poll("slow")
    assert late is not None
    assert late.offer is None
    assert queries.under_way == 1
    asks.run()
    assert [offer.lease for offer in queries.take_late()] == [77]  # the neighbour need not keep it
    assert queries.under_way == 0
    assert not queries.begin("next", Neighbour(**HINT), 0, HASHES, 0.25)  # it rests
    asks.clock.now_s += REST_S
    assert queries.begin("next", Neighbour(**HINT), 0, HASHES, 0.25)


def test_an_engine_does_not_ask_itself_and_not_one_that_failed(asks: QueriesBed) -> None:
    assert not asks.queries.begin("r", Neighbour("own", HINT["remote_bootstrap_addr"]), 0, HASHES, 0.25)
    asks.status = 403
    assert asks.queries.begin("r", Neighbour(**HINT), 0, HASHES[:4], 0.25)
    asks.run()
    query = asks.queries.poll("r")
    assert query is not None
    assert query.offer is None
    assert not asks.queries.begin("s", Neighbour(**HINT), 0, HASHES[:4], 0.25)


def test_an_engine_that_is_late_for_a_short_prompt_is_asked_for_a_long_one(asks: QueriesBed) -> None:
    assert asks.queries.begin("short", Neighbour(**HINT), 0, HASHES[:4], 0.0625)
    asks.clock.now_s += 0.0625
    late = asks.queries.poll("short")
    assert late is not None
    assert late.offer is None
    assert asks.queries.begin("long", Neighbour(**HINT), 0, HASHES[:4], 1.0)
    asks.queries.drop("long")
    asks.status = 500  # that the ask of "short" has failed is seen, too
    asks.run()
    assert asks.queries.take_late() == []
    assert not asks.queries.begin("next", Neighbour(**HINT), 0, HASHES[:4], 1.0)


def test_a_request_that_leaves_leaves_no_offer(asks: QueriesBed) -> None:
    asks.queries.begin("r", Neighbour(**HINT), 0, HASHES[:4], 0.25)
    asks.queries.drop("r")
    asks.run()
    assert [offer.lease for offer in asks.queries.take_late()] == [77]


def consumer() -> ConsumerScheduler:
    return ConsumerScheduler(
        fingerprint=FINGERPRINT,
        sizes=Sizes(2, 1),
        taker="127.0.0.1:4100",
        block_tokens=BLOCK_TOKENS,
        token=TOKEN,
        tally=Tally(),
    )


def test_blocks_are_pulled_from_where_the_engines_own_end() -> None:
    half, one = consumer(), FakeRequest("r", list(range(42)))
    offer = offer_of(ask_for(HASHES), b"", 6)
    assert half.take_cached(one, offer, 2)  # blocks 2 to 7 of the prompt
    assert half.matched(one, 4 * BLOCK_TOKENS) == 4 * BLOCK_TOKENS
    assert half.admitted(one, (tuple(range(100, 111)),), 4 * BLOCK_TOKENS)
    step = half.plan()
    assert (step.holds[0].blocks, step.pulls[0].first) == (6, 2)
    assert step.pulls[0].block_ids == ((104, 105, 106, 107),)
    assert step.pulls[0].is_cached
    half.reported("r", 3)
    assert half.ended("r")
    assert (half.cached_tokens(one), half.finished(one)) == (3 * BLOCK_TOKENS, None)
    assert not half.is_ours(one)


def test_blocks_that_do_not_follow_on_the_engines_own_are_not_taken() -> None:
    for local in (0, 8 * BLOCK_TOKENS, 3 * BLOCK_TOKENS + 1):
        half, one = consumer(), FakeRequest("r", list(range(42)))
        offer = offer_of(ask_for(HASHES), b"", 6)
        assert half.take_cached(one, offer, 2)
        assert half.matched(one, local) is None
        assert half.plan().drops == ("r",)


def test_an_offer_of_another_form_is_refused() -> None:
    half, one = consumer(), FakeRequest("r", list(range(42)))
    for changes in ({"fingerprint": bytes(32)}, {"ranks": ("a:1", "b:2", "c:3"), "tp_size": 3}):
        offer = offer_of(ask_for(HASHES), b"", 6, **changes)
        assert not half.take_cached(one, offer, 0)
        assert half.plan().refuses[0].source == offer


# The scheduler's half


class HalfBed:
    def __init__(self, asks: QueriesBed, stored: int, **fields: Any) -> None:
        self.pool, self.asks = FakePool(), asks
        self.half, self.blocks = scheduler_half(self.pool, clock=asks.clock, hash_algorithm="sha256")
        self.half.handover.consumer = consumer()
        self.half.handover.queries = asks.queries
        self.one = FakeRequest("r", list(range(41)), **{"block_hashes": HASHES[:10], **fields})
        self.one.kv_transfer_params = self.one.kv_transfer_params or {"moonpool": {"cached_at": HINT}}
        self.half.arrived(self.one)
        if self.pool.prefixes:
            self.pool.answer_prefix(stored)

    def matched(self, local: int = 0) -> Any:
        return self.half.matched_tokens(self.one, local)


def test_what_the_pool_lacks_comes_from_the_neighbour(asks: QueriesBed) -> None:
    asks.blocks = 8
    bed = HalfBed(asks, stored=2)
    assert bed.matched(BLOCK_TOKENS) == (None, False)
    asks.run()
    assert asks.asked[0].hashes == HASHES[1:10]
    assert bed.matched(BLOCK_TOKENS) == (8 * BLOCK_TOKENS, True)
    assert admit(bed.half, bed.one, BLOCK_TOKENS) == 8 * BLOCK_TOKENS
    step = bed.half.build_step(first_step(bed.one, 0, 0))  # type: ignore[arg-type]
    assert (step.loads, len(step.handover.pulls)) == ((), 1)
    report = FakeOutput(finished_recving={"r"}, kv_connector_worker_meta=Report(loaded={"r": 8}))
    bed.half.step_ended(report)
    answer = bed.half.finished(bed.one)
    assert answer is not None
    assert (answer["moonpool"]["neighbour_tokens"], answer["moonpool"]["pool_tokens"]) == (32, 0)
    assert bed.half.lookups.pins == 0


@pytest.mark.parametrize(("stored", "blocks"), [(2, 0), (2, 2), (7, 8)])
def test_the_pool_gives_what_the_neighbour_has_little_more_of(
    asks: QueriesBed, stored: int, blocks: int
) -> None:
    asks.blocks = blocks
    bed = HalfBed(asks, stored=stored)
    assert bed.matched() == (None, False)
    asks.run()
    assert bed.matched() == (stored * BLOCK_TOKENS, True)
    step = bed.half.handover.plan(FakeStep())  # type: ignore[arg-type]
    assert [refuse.source.lease for refuse in step.refuses] == [77] * bool(blocks)  # type: ignore[union-attr]


def test_which_surplus_is_worth_it() -> None:
    assert is_worth(SURPLUS_TOKENS_MIN, 0)
    assert not is_worth(SURPLUS_TOKENS_MIN - 1, 0)
    assert not is_worth(16, 10_000)
    assert is_worth(2_500, 10_000)


def test_for_a_wait_in_which_no_answer_comes_nothing_is_asked(asks: QueriesBed) -> None:
    """32 more tokens at 3,200 a second take 10 ms."""
    bed = HalfBed(asks, stored=2)
    assert bed.half._decision is not None
    for _ in range(20):
        bed.half._decision.step_took(64, 0.02)
    assert bed.matched() == (2 * BLOCK_TOKENS, True)
    assert asks.pending == []


def test_a_neighbour_that_does_not_answer_costs_a_wait_and_no_more(asks: QueriesBed) -> None:
    bed = HalfBed(asks, stored=2)
    assert bed.matched() == (None, False)
    asks.clock.now_s += 1.0
    assert bed.matched() == (2 * BLOCK_TOKENS, True)


def test_a_request_waits_for_a_share_of_what_computing_takes(asks: QueriesBed) -> None:
    """32 more tokens at 320 a second take 0.1 s."""
    bed = HalfBed(asks, stored=2)
    assert bed.half._decision is not None
    for _ in range(20):
        bed.half._decision.step_took(64, 0.2)
    assert bed.matched() == (None, False)
    asks.clock.now_s += 0.04
    assert bed.matched() == (None, False)
    asks.clock.now_s += 0.02
    assert bed.matched()[0] is not None


@pytest.mark.parametrize(
    ("stored", "fields"),
    [
        (10, {}),  # all that can be loaded
        (9, {}),  # all but one block
        (0, {"block_hashes": []}),  # an engine without a prefix cache
        (0, {"kv_transfer_params": {"moonpool": {"cached_at": HINT, "load": False}}}),
        (0, {"kv_transfer_params": {"moonpool": {}}}),
        (0, {"skip_reading_prefix_cache": True}),
    ],
)
def test_requests_that_ask_no_neighbour(asks: QueriesBed, stored: int, fields: dict[str, Any]) -> None:
    bed = HalfBed(asks, stored=stored, **{"kv_transfer_params": None, **fields})
    assert bed.matched() == (stored * BLOCK_TOKENS, stored > 0)
    assert asks.pending == []


def test_an_engine_that_forgot_what_was_stored_asks_no_neighbour(asks: QueriesBed) -> None:
    """Its weights may be others now, of which its fingerprint does not tell."""
    bed = HalfBed(asks, stored=0)
    assert bed.matched() == (None, False)
    bed.half.forget_everything_stored()
    asks.run()
    bed.half.build_step(FakeStep())  # type: ignore[arg-type]
    assert asks.queries.under_way == 0
    again = FakeRequest("again", list(range(41)), block_hashes=HASHES[:10])
    again.kv_transfer_params = {"moonpool": {"cached_at": HINT}}
    bed.half.arrived(again)
    bed.pool.answer_prefix(0)
    assert bed.half.matched_tokens(again, 0) == (0, False)
    assert asks.pending == []


def test_prompts_with_items_ask_no_neighbour(asks: QueriesBed) -> None:
    """vLLM names an image by an identifier that its client chooses."""
    bed = HalfBed(asks, stored=0, mm_features=[feature(1, 2)])
    while bed.matched() == (None, False) and not asks.pending:
        pass
    assert bed.half._requests["r"].chain is not None
    assert asks.pending == []


def test_a_request_that_waits_while_nothing_runs_takes_lent_blocks_back(asks: QueriesBed) -> None:
    """vLLM asks whether blocks become free only for requests that run."""
    half, offers = HalfBed(asks, stored=0).half, OffersBed()
    half.handover.producer = offers.producer
    offer = offers.take(ask_for(HASHES[:4]))
    assert offer is not None
    half.build_step(FakeStep())  # type: ignore[arg-type]
    assert offers.pool.held() == [10, 11, 12, 13]  # no request waits for room

    one = FakeRequest("own", list(range(41)))
    assert half.matched_tokens(one, 0) == (0, False)
    half.build_step(first_step(FakeRequest("other", [1]), 0, 1))  # type: ignore[arg-type]
    assert offers.pool.held() == [10, 11, 12, 13]  # others run, and end

    assert half.matched_tokens(one, 0) == (0, False)
    step = half.build_step(FakeStep())  # type: ignore[arg-type]
    assert offers.pool.held() == []
    assert [end.lease for end in step.handover.ends] == [offer.lease]


# Waking an idle engine


def test_an_engine_is_woken_and_nothing_stays_in_its_loop() -> None:
    class Connector:
        wake: Any = None

        def engine_waits(self, wake: Callable[[], None]) -> None:
            self.wake = wake

    class Queue:
        def __init__(self) -> None:
            self.got: list[Any] = []

        def put_nowait(self, one: Any) -> None:
            self.got.append(one)

    class Core:
        looks = 0

        def __init__(self) -> None:
            self.input_queue = Queue()
            self.scheduler = type("Scheduler", (), {"connector": Connector()})()

        def _process_input_queue(self) -> None:
            self.looks += 1

    class RequestType:
        WAKEUP = b"\x05"

    original = Core._process_input_queue
    assert compat.watch_idle(Core, RequestType)
    assert compat.watch_idle(Core, RequestType)
    core = Core()
    core._process_input_queue()
    core.scheduler.connector.wake()
    assert core.input_queue.got == [(RequestType.WAKEUP, None)]
    assert core._process_input_queue.__func__ is original
    core._process_input_queue()
    assert core.looks == 2
    assert not compat.watch_idle(Core, type("Older", (), {}))
