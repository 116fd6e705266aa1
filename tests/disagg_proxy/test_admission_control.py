"""A real proxy with mock engines whose prefill takes as long as the test wants: who is taken, who waits, who
is refused, and that nobody is forgotten.

An engine's model predicts 11 s for 10,000 tokens and 24 s for 20,000, and has no doubt of it. (Ten times the
proxy's own first guess: a test that is held up still finds an engine as busy as it is meant to be.)
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from pathlib import Path

import pytest

from moonpool._native import PrefillModel, ProxyRequest
from moonpool.core.config.proxy_section import BreakerLimits, HealthChecks
from moonpool.disagg_proxy.conductor.choice import Choice, Request
from moonpool.disagg_proxy.conductor.scheduler import EligibleWorkers
from moonpool.disagg_proxy.discovery.source import DiscoveredEngine
from moonpool.disagg_proxy.dispatch.observer import DispatchObserver
from moonpool.disagg_proxy.dispatch.pending import PendingProxyRequest
from moonpool.disagg_proxy.settings import AdmissionSettings
from tests.disagg_proxy.client_rows import ROWS, shown
from tests.disagg_proxy.harness import (
    Answer,
    Bed,
    Client,
    Exchange,
    FakeClock,
    MockEngine,
    bed,
    request_bytes,
    until,
    with_deadline,
)

LONG, SHORT = 20_000, 10_000


@pytest.fixture(autouse=True)
def _slow_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = PrefillModel.__init__

    def slower(model: PrefillModel) -> None:
        begin(model)
        assert model.regression.start([10.0 * each for each in model.regression.coefficients])

    monkeypatch.setattr(PrefillModel, "__init__", slower)
    monkeypatch.setattr(PrefillModel, "doubt_s", lambda model, *of, **how: 0.0)  # else no guess refuses any


def body(tokens: int, first: int = 1) -> bytes:
    """Prompts that have nothing in common, by their first token."""
    ids = [first, *range(1, tokens)]
    return json.dumps({"model": "m", "prompt": ids, "stream": True, "max_tokens": 8}).encode()


class Slow(MockEngine):
    """Answers a request when the test says so."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.behave = self.wait
        self.may_go = asyncio.Event()

    async def wait(self, exchange: Exchange) -> None:
        await self.may_go.wait()
        await exchange.begin_stream()
        await exchange.event('{"choices":[{"text":"x"}]}')
        await exchange.event("[DONE]")
        await exchange.end_stream()


def slow(engines: list[MockEngine]) -> asyncio.Event:
    """All of them; returns what lets them answer."""
    may_go = asyncio.Event()
    for engine in engines:
        held = Slow(engine.name)
        held.may_go = may_go
        engine.behave = held.wait
    return may_go


async def post(running: Bed, tokens: int, head: str = "", first: int = 1) -> Client:
    client = await running.client()
    await client.send(request_bytes("POST", "/v1/completions", body(tokens, first), head))
    return client


def gated(**settings: float) -> dict[str, object]:
    return {
        "policy": "conductor",
        "tokenizer": ("none",),
        "admission": AdmissionSettings(**settings),  # type: ignore[arg-type]
    }


def waiting(running: Bed) -> int:
    return running.proxy._dispatcher.scheduler.waiting


def reason(answer: Answer) -> str:
    error = json.loads(answer.body)["error"]
    assert error["type"] == "rate_limit_error"
    assert int(answer.headers["retry-after"]) >= 1
    assert f"try again in {answer.headers['retry-after']} s" in error["message"]
    return str(error["code"])


@with_deadline
async def test_what_would_be_too_late_is_refused_at_once_and_reaches_no_engine() -> None:
    async with bed(1, **gated(ttft_slo=40.0)) as running:  # type: ignore[arg-type]
        may_go = slow(running.engines)
        first = await post(running, LONG)
        await until(lambda: len(running.engines[0].seen) == 1)
        refused = await (await post(running, LONG, first=2)).answer()
        assert refused.status == 429
        assert reason(refused) == "ttft"
        assert running.metric("moonpool_proxy_rejected_total", reason="ttft") == 1
        shorter = await post(running, SHORT, first=3)  # 24 s + 11 s
        await until(lambda: len(running.engines[0].seen) == 2)
        may_go.set()
        assert [(await client.answer()).status for client in (first, shorter)] == [200, 200]
        again = await post(running, LONG, first=4)
        assert (await again.answer()).status == 200


@with_deadline
async def test_in_overload_a_long_prompt_is_refused_and_short_ones_are_not() -> None:
    """30 come at once, for a minute each: in the long run four times what decodes at 21 ms. None of them
    ends before the last prompt is computed, half a minute later, which would be a matter of chance."""
    async with bed(1, **gated(gap_slo=0.021)) as running:  # type: ignore[arg-type]
        may_go, engine = slow(running.engines), running.engines[0]
        admission = running.proxy._dispatcher.scheduler.admission
        assert admission is not None
        clients = [await post(running, LONG)]  # nobody was there yet
        clients += [await post(running, 10, first=number) for number in range(2, 31)]
        await until(lambda: len(engine.seen) == 30)
        for _ in range(400):
            admission.answers.observe(60.0, 100)
        refused = await (await post(running, LONG, first=31)).answer()
        assert refused.status == 429
        assert reason(refused) == "long"
        assert refused.headers["retry-after"] == str(math.ceil(admission.answers.times.mean_s))
        assert running.metric("moonpool_proxy_rejected_total", reason="long") == 1
        assert len(engine.seen) == 30
        clients.append(await post(running, 10, first=32))
        await until(lambda: len(engine.seen) == 31)
        may_go.set()
        assert {(await client.answer()).status for client in clients} == {200}


@with_deadline
async def test_a_request_may_have_an_objective_of_its_own() -> None:
    async with bed(1, **gated(ttft_slo=60.0)) as running:  # type: ignore[arg-type]
        slow(running.engines).set()
        strict = await post(running, LONG, "X-Moonpool-TTFT-SLO: 1.5\r\n")
        assert reason(await strict.answer()) == "ttft"
        easy = await post(running, LONG, "X-Moonpool-TTFT-SLO: 0\r\n")
        assert (await easy.answer()).status == 200
        odd = await (await post(running, LONG, "X-Moonpool-Priority: urgent\r\n")).answer()
        assert odd.status == 400
        assert json.loads(odd.body)["error"]["code"] == "bad_header"


@with_deadline
async def test_who_waits_is_sent_when_an_engine_is_free_the_most_urgent_first() -> None:
    async with bed(1, **gated(queue_max=10)) as running:  # type: ignore[arg-type]
        may_go = slow(running.engines)
        engine = running.engines[0]
        running_one = await post(running, LONG)
        await until(lambda: len(engine.seen) == 1)
        later = [await post(running, LONG, first=2)]
        await until(lambda: waiting(running) == 1)
        page = (await running.ask("GET", "/metrics")).body
        assert b"\nmoonpool_proxy_queue_requests 1.0\n" in page
        assert b'\nmoonpool_proxy_admission_margin{prediction="ttft"} 1.0\n' in page
        later.append(
            await post(running, LONG, "X-Moonpool-Priority: 5\r\nX-Moonpool-Decision: 1\r\n", first=3)
        )
        await until(lambda: waiting(running) == 2)
        assert len(engine.seen) == 1
        may_go.set()
        answers = [await client.answer() for client in (running_one, *later)]
        assert [answer.status for answer in answers] == [200, 200, 200]
        assert [json.loads(seen.body)["prompt"][0] for seen in engine.seen] == [1, 3, 2]
        assert json.loads(answers[2].headers["x-moonpool-decision"])["queued_s"] > 0
        assert waiting(running) == 0


@with_deadline
async def test_a_full_queue_refuses_unless_somebody_in_it_is_less_urgent() -> None:
    async with bed(1, **gated(queue_max=2)) as running:  # type: ignore[arg-type]
        may_go = slow(running.engines)
        clients = [await post(running, LONG)]
        await until(lambda: len(running.engines[0].seen) == 1)
        for first in (2, 3):
            clients.append(await post(running, SHORT, first=first))
            await until(lambda count=first - 1: waiting(running) == count)  # type: ignore[misc]
        refused = await (await post(running, SHORT, first=4)).answer()
        assert reason(refused) == "queue_full"
        urgent = await post(running, SHORT, "X-Moonpool-Priority: 1\r\n", first=5)
        assert reason(await clients[2].answer()) == "queue_full"  # the last of the least urgent
        may_go.set()
        assert [(await client.answer()).status for client in (clients[0], urgent, clients[1])] == [200] * 3
        assert running.metric("moonpool_proxy_rejected_total", reason="queue_full") == 2


@with_deadline
async def test_nobody_waits_beyond_the_deadline() -> None:
    clock = FakeClock()
    async with bed(1, clock=clock, **gated(queue_max=10, queue_deadline=20.0)) as running:  # type: ignore[arg-type]
        may_go = slow(running.engines)
        first = await post(running, LONG)
        await until(lambda: len(running.engines[0].seen) == 1)
        late = await post(running, LONG, first=2)
        await until(lambda: waiting(running) == 1)
        clock.now += 19.0
        await asyncio.sleep(0)
        clock.now += 2.0
        assert reason(await late.answer()) == "deadline"
        may_go.set()
        assert (await first.answer()).status == 200


@with_deadline
async def test_who_leaves_is_in_the_queue_no_more() -> None:
    async with bed(1, **gated(queue_max=10)) as running:  # type: ignore[arg-type]
        may_go = slow(running.engines)
        first = await post(running, LONG)
        await until(lambda: len(running.engines[0].seen) == 1)
        gone = await post(running, LONG, first=2)
        await until(lambda: waiting(running) == 1)
        gone.leave()
        await until(lambda: waiting(running) == 0)
        may_go.set()
        assert (await first.answer()).status == 200
        assert len(running.engines[0].seen) == 1


@with_deadline
async def test_who_wants_what_no_engine_can_do_keeps_nobody_waiting() -> None:
    clock = FakeClock()
    async with bed(1, clock=clock, **gated(queue_max=10, queue_deadline=500.0)) as running:  # type: ignore[arg-type]
        slow(running.engines).set()
        never = await post(running, 10, "X-Moonpool-Gap-SLO: 0.000001\r\nX-Moonpool-Priority: 9\r\n")
        assert reason(await never.answer()) == "gap"
        admission = running.proxy._dispatcher.scheduler.admission
        assert admission is not None
        admission.gap_margin.factor = 4.0  # so that an empty engine is too slow only for now
        strict = await post(running, 10, "X-Moonpool-Gap-SLO: 0.02\r\nX-Moonpool-Priority: 9\r\n")
        await until(lambda: waiting(running) == 1)
        assert (await (await post(running, 10, first=2)).answer()).status == 200
        assert waiting(running) == 1
        admission.gap_margin.factor = 1.0
        assert (await strict.answer()).status == 200


@with_deadline
async def test_an_end_lets_who_waits_go_on_or_refuses_it_but_forgets_nobody() -> None:
    clock = FakeClock()
    async with bed(1, clock=clock, **gated(queue_max=10, queue_deadline=500.0)) as running:  # type: ignore[arg-type]
        may_go = slow(running.engines)
        first = await post(running, LONG)
        await until(lambda: len(running.engines[0].seen) == 1)
        late = await post(running, LONG, first=2)
        await until(lambda: waiting(running) == 1)
        draining = asyncio.ensure_future(running.proxy.drain())
        await until(lambda: not running.proxy._listening)
        await asyncio.sleep(0.05)  # the drain's half begins with it
        clock.now += 16.0
        assert reason(await late.answer()) == "deadline"
        may_go.set()
        assert (await first.answer()).status == 200
        assert await draining


@with_deadline
async def test_an_engine_that_dies_while_others_wait_costs_them_nothing() -> None:
    async with bed(2, **gated(queue_max=10)) as running:  # type: ignore[arg-type]
        may_go = slow(running.engines)
        clients = [await post(running, LONG, first=number) for number in (1, 2)]
        await until(lambda: all(len(engine.seen) == 1 for engine in running.engines))
        clients += [await post(running, LONG, first=number) for number in (3, 4)]
        await until(lambda: waiting(running) == 2)
        await running.engines[0].stop()  # its request goes to the other one, too
        may_go.set()
        assert [(await client.answer()).status for client in clients] == [200] * 4
        assert waiting(running) == 0


@with_deadline
async def test_who_waits_goes_to_an_engine_that_joins_before_who_comes_then() -> None:
    settings = gated(queue_max=10) | {"discovery": ("http",), "engines_max": 3}
    async with bed(1, **settings) as running:  # type: ignore[arg-type]
        may_go = slow(running.engines)
        clients = [await post(running, LONG)]
        await until(lambda: len(running.engines[0].seen) == 1)
        for first in (2, 3, 4):
            clients.append(await post(running, LONG, first=first))
            await until(lambda count=first - 1: waiting(running) == count)  # type: ignore[misc]
        more = Slow("more")
        more.may_go = may_go
        await more.start()
        running.engines.append(more)
        joined = running.proxy.fleet.join(DiscoveredEngine(more.spec))
        await until(lambda: joined.liveness.healthy)
        clients.append(await post(running, LONG, first=5))
        await until(lambda: len(more.seen) == 1)
        assert json.loads(more.seen[0].body)["prompt"][0] == 2
        await until(lambda: waiting(running) == 3)
        may_go.set()
        assert [(await client.answer()).status for client in clients] == [200] * 5


@with_deadline
async def test_who_waits_goes_to_an_engine_that_is_well_again() -> None:
    """Nobody new comes."""
    often = HealthChecks(interval_s=0.01)
    async with bed(2, health=often, **gated(queue_max=10)) as running:  # type: ignore[arg-type]
        may_go = slow(running.engines)
        well, ill = running.engines
        ill.healthy = False
        await until(lambda: not running.proxy.engines[1].liveness.healthy)
        clients = [await post(running, LONG)]
        await until(lambda: len(well.seen) == 1)
        clients += [await post(running, LONG, first=number) for number in (2, 3)]
        await until(lambda: waiting(running) == 2)
        ill.healthy = True
        await until(lambda: len(ill.seen) == 1)
        assert waiting(running) == 1
        may_go.set()
        assert [(await client.answer()).status for client in clients] == [200] * 3


@with_deadline
async def test_who_waits_goes_to_an_engine_that_has_rested() -> None:
    """Nobody new comes. One is tried there, and the others when that went well."""
    clock, breaker = FakeClock(), BreakerLimits(failures_max=1, open_s=10.0)
    settings = gated(queue_max=10, queue_deadline=1000.0)
    async with bed(2, clock=clock, breaker=breaker, **settings) as running:  # type: ignore[arg-type]
        dispatcher, relay = running.proxy._dispatcher, running.proxy.relay
        may_go = slow(running.engines)
        good, bad = running.engines
        serve, bad.behave = bad.behave, lambda exchange: exchange.answer(b"{}", 500)
        clients = [await post(running, LONG)]
        await until(lambda: len(good.seen) == 1)
        assert (await (await post(running, LONG, first=9)).answer()).status == 500
        await until(lambda: relay.rests_until(1) > relay.now())
        clients += [await post(running, LONG, first=number) for number in (2, 3)]
        await until(lambda: waiting(running) == 2)
        with dispatcher._lock:
            assert [
                each.place for each in dispatcher.candidates._now_there(dispatcher.engines, clock.now)
            ] == [0]
        bad.behave = serve
        clock.now += 11
        await until(lambda: len(bad.seen) == 2)
        assert relay.rests_until(1) == math.inf
        with dispatcher._lock:
            assert [
                each.place for each in dispatcher.candidates._now_there(dispatcher.engines, clock.now)
            ] == [0]
        may_go.set()
        assert [(await client.answer()).status for client in clients] == [200] * 3
        await until(lambda: relay.rests_until(1) == 0)


@with_deadline
async def test_nobody_who_waits_is_sent_to_an_engine_that_leaves() -> None:
    settings = gated(queue_max=10) | {"discovery": ("http",), "engines_max": 3}
    async with bed(2, **settings) as running:  # type: ignore[arg-type]
        leaver, other = running.engines
        others_may_go, end = slow([other]), asyncio.Event()
        first_token = asyncio.Event()

        async def stream(exchange: Exchange) -> None:
            await first_token.wait()
            await exchange.begin_stream()
            await exchange.event('{"choices":[{"text":"x"}]}')
            await end.wait()
            await exchange.event("[DONE]")
            await exchange.end_stream()

        leaver.behave = stream
        gate = running.proxy._dispatcher.scheduler.controller
        assert gate is not None
        came, arrive = [], gate.arrive

        def count(*args: object) -> object:
            came.append(args[0])
            return arrive(*args)  # type: ignore[arg-type]

        gate.arrive = count  # type: ignore[method-assign, assignment]
        clients = [await post(running, LONG, first=number) for number in (1, 2)]
        await until(lambda: len(leaver.seen) == len(other.seen) == 1)
        for number in (3, 4, 5):
            clients.append(await post(running, LONG, first=number))
            await until(lambda count=number - 2: waiting(running) == count)  # type: ignore[misc]
        running.proxy.fleet.leave(leaver.name)
        first_token.set()
        instance = running.proxy._dispatcher.candidates.worker_at[0]
        assert instance is not None
        await until(lambda: instance.load.wait_s(running.proxy._dispatcher._clock()) < 1.0)
        others_may_go.set()
        await until(lambda: len(other.seen) == 4)
        assert [json.loads(seen.body)["prompt"][0] for seen in other.seen[1:]] == [3, 4, 5]
        assert len(leaver.seen) == 1
        assert len(came) == 5
        end.set()


@with_deadline
async def test_while_engines_stay_the_same_policies_get_the_same_tuple() -> None:
    """They keep what they have found about it, which takes long where there are many engines."""
    async with bed(2, **gated(queue_max=10)) as running:  # type: ignore[arg-type]
        may_go = slow(running.engines)
        clients = [await post(running, LONG, first=number) for number in (1, 2, 3)]
        await until(lambda: waiting(running) == 1)
        dispatcher, given = running.proxy._dispatcher, []
        able = dispatcher.eligible

        def looked(pending: PendingProxyRequest) -> EligibleWorkers:
            given.append(able(pending).workers)
            return able(pending)

        dispatcher.eligible = looked  # type: ignore[method-assign]
        await until(lambda: len(given) >= 3)
        assert len(set(map(id, given))) == 1
        dispatcher.became(dispatcher.engines[0])  # another role, perhaps
        seen = len(given)
        await until(lambda: len(given) > seen)
        assert given[-1] == given[0]
        assert given[-1] is not given[0]
        dispatcher.engines[0].refused("it is not there")
        await until(lambda: len(given[-1]) == 1)
        assert given[-1] == dispatcher.workers[1:]
        may_go.set()
        assert [(await client.answer()).status for client in clients] == [200] * 3


@with_deadline
async def test_a_policy_that_chooses_nonsense_keeps_nobody_waiting() -> None:
    async with bed(1, **gated(queue_max=10)) as running:  # type: ignore[arg-type]
        may_go = slow(running.engines)
        clients = [await post(running, LONG)]
        await until(lambda: len(running.engines[0].seen) == 1)
        for first in (2, 3):
            clients.append(await post(running, LONG, first=first))
            await until(lambda count=first - 1: waiting(running) == count)  # type: ignore[misc]
        dispatcher = running.proxy._dispatcher
        dispatcher.scheduler.policy.choose = lambda *args: None  # type: ignore[method-assign, assignment, return-value]

        class Failing(DispatchObserver):
            def on_choice(self, request: ProxyRequest, choice: Choice) -> None:
                raise RuntimeError("odd")

        dispatcher.subscribe(Failing())
        may_go.set()
        assert [(await client.answer()).status for client in clients] == [200] * 3
        assert dispatcher.late_errors == 4


@with_deadline
async def test_prefill_and_decode_apart_are_one_gate() -> None:
    roles = ("prefill", "decode")
    async with bed(2, roles=roles, **gated(ttft_slo=40.0)) as running:  # type: ignore[arg-type]
        prefill, decode = running.engines
        may_go = asyncio.Event()

        async def compute(exchange: Exchange) -> None:
            await may_go.wait()
            await exchange.answer(b'{"kv_transfer_params":{"remote_engine_id":"p"}}')

        prefill.behave = compute
        decode.behave = Slow("d").wait
        first = await post(running, LONG)
        await until(lambda: len(prefill.seen) == 1)
        assert reason(await (await post(running, LONG, first=2)).answer()) == "ttft"
        assert not decode.seen
        may_go.set()
        await until(lambda: len(decode.seen) == 1)
        first.leave()
        await until(lambda: decode.seen[0].gone.is_set())


@with_deadline
async def test_what_is_no_generation_is_not_weighed() -> None:
    async with bed(1, **gated(ttft_slo=0.001)) as running:  # type: ignore[arg-type]
        answer = await running.ask("POST", "/v1/embeddings", b'{"model":"m","input":"x"}')
        assert answer.status == 200
        answer = await running.ask("POST", "/v1/completions", body(10))
        assert answer.status == 429


@with_deadline
async def test_a_policy_that_fails_does_not_keep_those_who_wait() -> None:
    async with bed(1, **gated(queue_max=10)) as running:  # type: ignore[arg-type]
        may_go = slow(running.engines)
        first = await post(running, LONG)
        await until(lambda: len(running.engines[0].seen) == 1)
        waits = await post(running, LONG, first=2)
        await until(lambda: waiting(running) == 1)
        dispatcher = running.proxy._dispatcher

        def fail(*args: object) -> None:
            raise RuntimeError("odd")

        dispatcher.scheduler.policy.choose = fail  # type: ignore[method-assign, assignment]
        may_go.set()
        assert [(await client.answer()).status for client in (first, waits)] == [200, 200]
        assert dispatcher.late_errors == 1


@with_deadline
async def test_a_policy_that_fails_lets_nobody_past_the_gate() -> None:
    roles = ("prefill", "decode")
    async with bed(2, roles=roles, **gated(ttft_slo=40.0)) as running:  # type: ignore[arg-type]
        may_go = slow(running.engines)
        prefill, decode = running.engines
        dispatcher = running.proxy._dispatcher

        def fail(*args: object) -> None:
            raise RuntimeError("odd")

        dispatcher.scheduler.policy.choose = fail  # type: ignore[method-assign, assignment]
        first = await post(running, LONG)
        await until(lambda: len(decode.seen) == 1)
        assert reason(await (await post(running, LONG, first=2)).answer()) == "ttft"
        may_go.set()
        assert (await first.answer()).status == 200
        assert dispatcher.late_errors == 2
        assert running.metric("moonpool_proxy_policy_errors_total") == 2
        assert not prefill.seen


@with_deadline
async def test_without_its_policy_nobody_is_sent_where_nothing_is_answered_alone() -> None:
    """The decode engine is SGLang's, the first of equals, and no prefill engine is there."""
    async with bed(2, roles=("decode", "both"), **gated(ttft_slo=60.0)) as running:  # type: ignore[arg-type]
        decode, whole = running.engines
        dispatcher = running.proxy._dispatcher

        def fail(*args: object) -> None:
            raise RuntimeError("odd")

        dispatcher.scheduler.policy.choose = fail  # type: ignore[method-assign, assignment]
        instance = dispatcher.candidates.worker_at[0]
        assert instance is not None
        instance.self_sufficient = False
        assert (await (await post(running, LONG)).answer()).status == 200
        assert (len(decode.seen), len(whole.seen)) == (0, 1)


@pytest.mark.parametrize("most", [2**63 - 1, -(2**63)])
@with_deadline
async def test_no_length_of_an_answer_is_a_way_past_the_gate(most: int) -> None:
    roles = ("prefill", "decode")
    async with bed(2, roles=roles, **gated(ttft_slo=1.0)) as running:  # type: ignore[arg-type]
        asked = json.dumps({"model": "m", "prompt": list(range(LONG)), "max_tokens": most}).encode()
        answer = await running.ask("POST", "/v1/completions", asked)
        assert (answer.status, reason(answer)) == (429, "ttft")
        assert not any(engine.seen for engine in running.engines)
        assert running.metric("moonpool_proxy_policy_errors_total") == 0


@with_deadline
async def test_a_policy_hears_of_what_is_sent_and_of_nothing_else() -> None:
    async with bed(1, **gated(queue_max=1)) as running:  # type: ignore[arg-type]
        dispatcher, told = running.proxy._dispatcher, []

        def hear(asked: Request, choice: Choice, now_s: float) -> None:
            told.append((asked.tokens, asked.session, choice.decode.place))
            raise RuntimeError("odd")  # which costs nobody an answer

        dispatcher.scheduler._sent_hook = hear
        may_go = slow(running.engines)
        first = await post(running, LONG, "X-Moonpool-Session: a\r\n")
        await until(lambda: len(running.engines[0].seen) == 1)
        waits = await post(running, LONG + 1, "X-Moonpool-Session: b\r\n", first=2)
        await until(lambda: waiting(running) == 1)
        refused = await post(running, LONG + 2, "X-Moonpool-Session: c\r\n", first=3)
        assert (await refused.answer()).status == 429
        assert told == [(LONG, "a", 0)]
        may_go.set()
        assert [(await client.answer()).status for client in (first, waits)] == [200, 200]
        assert told == [(LONG, "a", 0), (LONG + 1, "b", 0)]
        assert dispatcher.late_errors == 2


@pytest.mark.parametrize("seed", range(2))
@with_deadline
async def test_many_wait_and_each_gets_one_answer(seed: int) -> None:
    """Hundreds at once, of whom some leave, before engines that answer at once when they may."""
    import random

    chance = random.Random(seed)
    async with bed(2, **gated(queue_max=150, ttft_slo=600.0)) as running:  # type: ignore[arg-type]
        may_go = slow(running.engines)
        clients = []
        for number in range(300):
            head = f"X-Moonpool-Priority: {chance.randrange(3)}\r\n"
            clients.append(await post(running, 2_000, head, first=number))
        await until(lambda: waiting(running) == 150)
        leaving = chance.sample(range(300), 40)
        for number in leaving:
            clients[number].leave()
        began = time.monotonic()
        may_go.set()
        statuses = [(await client.answer()).status for n, client in enumerate(clients) if n not in leaving]
        assert set(statuses) <= {200, 429}, seed
        assert statuses.count(200) >= 100, seed
        assert time.monotonic() - began < 15
        assert waiting(running) == 0


@with_deadline
async def test_tenant_and_priority_are_the_rows_whatever_a_client_claims(tmp_path: Path) -> None:
    """B claims other tenants, whose share is unused, and the highest priority."""
    file = tmp_path / "clients.toml"
    file.write_text(ROWS)
    async with bed(1, clients_file=str(file), **gated(queue_max=10)) as b:  # type: ignore[arg-type]
        may_go, engine = slow(b.engines), b.engines[0]
        clients = [await post(b, LONG, shown("a"))]
        await until(lambda: len(engine.seen) == 1)
        for first, claimed in (
            (2, shown("b") + "X-Moonpool-Tenant: x1\r\nX-Moonpool-Priority: 100\r\n"),
            (3, shown("b") + "X-Moonpool-Tenant: first\r\nX-Moonpool-Priority: 99\r\n"),
            (4, shown("b")),
            (5, shown("a") + "X-Moonpool-Priority: 7\r\n"),
            (6, shown("a") + "X-Moonpool-Tenant: b\r\nX-Moonpool-Priority: -3\r\n"),
        ):
            clients.append(await post(b, LONG, claimed, first=first))
            await until(lambda count=first - 1: waiting(b) == count)  # type: ignore[misc]
        queue = b.proxy._dispatcher.scheduler.controller.queue
        assert sorted((each.tenant, each.priority) for each in queue) == [
            ("b", 0),
            ("b", 0),
            ("b", 0),
            ("first", -3),
            ("first", 5),
        ]
        may_go.set()
        assert [(await client.answer()).status for client in clients] == [200] * 6
        assert [json.loads(each.body)["prompt"][0] for each in engine.seen] == [1, 5, 2, 3, 4, 6]
