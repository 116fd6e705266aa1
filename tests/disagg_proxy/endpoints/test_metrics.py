"""Who scrapes holds up nobody, and several who scrape are as much work as one."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
from prometheus_client.core import Metric

from moonpool.disagg_proxy.endpoints import metrics
from moonpool.disagg_proxy.endpoints.relay_metrics import exposition
from tests.disagg_proxy.harness import bed, request_bytes, until, with_deadline


@with_deadline
async def test_all_who_ask_while_a_text_is_made_get_it_and_the_loop_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_go, threads = threading.Event(), list[int]()

    def slowly(families: Sequence[Metric]) -> bytes:
        threads.append(threading.get_ident())
        assert may_go.wait(20)
        return exposition(families)

    monkeypatch.setattr(metrics, "exposition", slowly)
    async with bed(1) as b:
        asking = [await b.client() for _ in range(5)]
        for client in asking:
            await client.send(request_bytes("GET", "/metrics"))
        await until(lambda: len(b.proxy._pages._metrics_endpoint._asking) == 5)
        assert (await b.ask("GET", "/health")).status == 200
        may_go.set()
        answers = [await client.answer() for client in asking]
    assert len({answer.body for answer in answers}) == len(threads) == 1
    assert answers[0].body.count(b"moonpool_proxy_engine_healthy{") == 1
    assert threading.get_ident() not in threads


@with_deadline
async def test_a_text_that_was_work_is_kept_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    async with bed(1) as b:

        async def accepted() -> bytes:
            page = (await b.ask("GET", "/metrics")).body
            return next(row for row in page.splitlines() if row.startswith(b"moonpool_proxy_accepted"))

        assert await accepted() != await accepted()
        monkeypatch.setattr(metrics, "CHEAP_S", 0.0)
        monkeypatch.setattr(metrics, "KEPT_S", 1e6)
        kept = await accepted()
        assert await accepted() == kept
        b.proxy._pages._metrics_endpoint._kept_until_s = 0.0
        assert await accepted() != kept


@with_deadline
async def test_a_text_that_cannot_be_made_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(families: Sequence[Metric]) -> bytes:
        raise RuntimeError("odd")

    async with bed(1) as b:
        with monkeypatch.context() as patch:
            patch.setattr(metrics, "exposition", fail)
            assert (await b.ask("GET", "/metrics")).status == 500
        assert (await b.ask("GET", "/metrics")).status == 200
