"""Text that the proxy tokenises itself: from the data plane's line to a decision."""

from __future__ import annotations

import asyncio
from pathlib import Path

from moonpool.disagg_proxy.tools.mock_engine.settings import MockSettings, Timing
from tests.disagg_proxy.fleet_bed import fleet, play


def test_each_text_is_decided_about_by_its_ids(model_folder: Path) -> None:
    async def scenario() -> None:
        mock = MockSettings(timing=Timing(prefill_s_per_token=5e-5))  # 0.1 s of each text
        tokenizer = (f"mock={model_folder}",)
        async with fleet("prefill", "prefill", "decode", "decode", mock=mock, tokenizer=tokenizer) as f:
            texts = [f"talk {number}: " + "lorem ipsum " * 200 for number in range(40)]
            whys = [why for _, why in await asyncio.gather(*map(f.ask, texts))]
            assert all(why["prompt_tokens"] > 500 for why in whys)
            assert not any(why["own_tokens"] for why in whys)
            assert {"prefill-0", "prefill-1"} & {why["prefill"] for why in whys}
            asked = 0
            for text, before in zip(texts, whys, strict=True):
                found = 0
                while found <= 400:  # a slow answer makes the other engine look better: it has it then
                    _, why = await f.ask(text)
                    assert why["prompt_tokens"] == before["prompt_tokens"]
                    found, asked = why["own_tokens"], asked + 1
                    assert asked <= 3 * 40
            known = f.proxy._dispatcher.prompts.known
            assert (known.hits, known.misses) == (asked, 40)
            assert f.proxy._dispatcher.blind == 0
            await f.settle()

    play(scenario)


def test_text_for_a_model_without_a_tokenizer_is_served_without_their_prefix(model_folder: Path) -> None:
    async def scenario() -> None:
        async with fleet("both", tokenizer=(f"another={model_folder}",)) as f:
            _, why = await f.ask("x" * 4_000)
            assert why["prompt_tokens"] == 0
            assert f.proxy._dispatcher.blind == 1
            await f.settle()

    play(scenario)
