"""SGLang's own ``mooncake`` backend for HiCache, unchanged, over the drop-in, in a real server: a prompt that
it stored comes back, and every answer is Hugging Face's."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.connectors.mooncake.conftest import PACKAGE
from tests.connectors.sglang.bed import FULL_PAGES, HuggingFace, eventually, make_bed, prompts
from tests.connectors.sglang.server import PAGE_TOKENS, Server
from tests.core.master_bed import MasterProcess
from tests.core.store_bed import MIB

WHOLE = FULL_PAGES * PAGE_TOKENS


@pytest.mark.sglang
@pytest.mark.heavy
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_prompt_comes_back_from_the_drop_in(
    master: MasterProcess, make_store: Callable[..., Any], tmp_path: Path, rng: random.Random
) -> None:
    pool = make_store(64 * MIB)

    def objects() -> int:
        return int(pool._ask(lambda store: store.stat())["objects"])

    extra: dict[str, object] = {
        "master_server_address": master.address,
        "local_hostname": "127.0.0.1",
        "metadata_server": "P2PHANDSHAKE",
        "global_segment_size": 0,  # the pages are to outlive the engine
        "protocol": "tcp",
        "device_name": "",
    }
    with make_bed(tmp_path) as bed:
        asked = prompts(rng, 2)
        server = Server(
            bed.model,
            bed.runtime,
            bed.plugin,
            tmp_path / "server.log",
            layout="page_first_direct",
            extra=extra,
            backend="mooncake",
            paths=[PACKAGE],
        )
        try:
            reference = HuggingFace(bed, asked)
            server.wait()
            expected = reference.answers()
            before = objects()
            assert server.generate(asked[0]) == (expected[0], 0)
            eventually(lambda: objects() >= before + 2 * FULL_PAGES, "not all keys and values are stored")
            server.forget()
            assert server.generate(asked[0]) == (expected[0], WHOLE)
            assert server.generate(asked[1]) == (expected[1], 0)
            server.forget()
            assert pool.remove_all(force=True) >= 2 * FULL_PAGES
            assert server.generate(asked[0]) == (expected[0], 0)
        finally:
            print(server.tail())
            server.close()
