"""The bootstrap page, as vLLM's example proxy and our decode engines read it."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from moonpool.connectors.vllm.pd.bootstrap import Bootstrap, find_worker
from moonpool.core.addresses import Address
from moonpool.core.errors import ConfigError, Unavailable


@pytest.fixture
def page() -> Iterator[Bootstrap]:
    workers = {(0, 0): "127.0.0.1:1", (1, 0): "127.0.0.1:2"}
    page = Bootstrap(Address("127.0.0.1", 0), dp_rank=3, engine_id="e", workers=workers)
    yield page
    page.close()


def test_query(page: Bootstrap) -> None:
    with urllib.request.urlopen(f"http://{page.address}/query", timeout=10) as answer:
        assert json.load(answer) == {
            "3": {"engine_id": "e", "worker_addr": {"0": {"0": "127.0.0.1:1"}, "1": {"0": "127.0.0.1:2"}}}
        }
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"http://{page.address}/other", timeout=10)


def test_workers_are_found(page: Bootstrap) -> None:
    for url in (f"http://{page.address}", f"http://{page.address}/"):
        assert find_worker(url, "e", tp_rank=1, pp_rank=0) == "127.0.0.1:2"
    with pytest.raises(Unavailable, match="no worker of tensor rank 2"):
        find_worker(f"http://{page.address}", "e", tp_rank=2, pp_rank=0)
    with pytest.raises(Unavailable, match="knows no engine f"):
        find_worker(f"http://{page.address}", "f", tp_rank=0, pp_rank=0)


def test_nobody_there(free_port: int) -> None:
    with pytest.raises(Unavailable):
        find_worker(f"http://127.0.0.1:{free_port}", "e", tp_rank=0, pp_rank=0)


def test_a_port_in_use(page: Bootstrap) -> None:
    with pytest.raises(ConfigError, match="give another bootstrap_port"):
        Bootstrap(page.address, dp_rank=0, engine_id="e", workers={})
