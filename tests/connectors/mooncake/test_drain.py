"""The pages of a master by which a segment is emptied before it goes away."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from mooncake._drain import DrainJobs
from mooncake.store import MooncakeDistributedStore, ReplicateConfig

from tests.core.master_bed import ADMIN_TOKEN
from tests.core.store_bed import MIB, until

from .commands import Command
from .long_waits import wait_known

Ask = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def pool() -> Iterator[tuple[str, Ask]]:
    """The address of a `mooncake_master`, and what its pages answer."""
    command = Command("cli", "--rpc_address=127.0.0.1", "--rpc_port=0", "-metrics_port", "0")
    address, url = command.line.removeprefix("moonpool master at ").split(", ")
    url = url.removesuffix("/metrics")

    def ask(method: str, path: str, body: Any = None, token: str = ADMIN_TOKEN) -> tuple[int, dict[str, Any]]:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {token}"}
        request = urllib.request.Request(f"{url}/api/v1/{path}", data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            text = error.read()
            return error.code, json.loads(text) if text.startswith(b"{") else {}

    yield address, ask
    assert command.end() == 0


def made(address: str, name: str, size: int = 32 * MIB) -> MooncakeDistributedStore:
    store = MooncakeDistributedStore()
    assert store.setup(name, "P2PHANDSHAKE", size, 0, "tcp", "", address) == 0
    wait_known(store)
    return store


def places(store: MooncakeDistributedStore, keys: list[str]) -> set[str]:
    """Of all of the keys; nothing before the directory knows each of them: a job finds no others."""
    found = store.batch_get_replica_desc(keys)
    return {
        one.get_memory_descriptor().buffer_descriptor.transport_endpoint
        for copies in found.values()
        for one in copies
        if len(found) == len(keys)
    }


def ended(ask: Ask, job: str) -> dict[str, Any]:
    def page() -> dict[str, Any] | None:
        status, answer = ask("GET", f"drain_jobs/query?job_id={job}")
        assert (status, answer["success"]) == (200, True)
        return answer if answer["status_name"] in ("SUCCEEDED", "FAILED") else None

    return until(page, 60)  # it opens two connections for each of its objects


def test_a_segment_is_emptied(pool: tuple[str, Ask]) -> None:
    address, ask = pool
    one, other, third = (made(address, "127.0.0.1") for _ in range(3))
    try:
        a, b, c = (store.get_hostname() for store in (one, other, third))
        config = ReplicateConfig()
        config.preferred_segment = a
        keys = [f"k{i}" for i in range(20)]
        for key in keys:
            assert one.put(key, key.encode() * 1000, config) == 0
        assert until(lambda: places(other, keys) == {a})
        config.preferred_segment = b
        assert other.put("stays", b"x", config) == 0
        status, answer = ask("POST", "drain_jobs", {"segments": [a], "target_segments": [b]})
        assert (status, answer["success"], answer["status"], answer["error_code"]) == (
            200,
            True,
            "CREATED",
            0,
        )
        job = answer["job_id"]
        page = ended(ask, job)
        assert (page["status_name"], page["type_name"], page["segments"]) == ("SUCCEEDED", "DRAIN", [a])
        counts = page["succeeded_units"], page["failed_units"], page["active_units"], page["migrated_bytes"]
        assert counts == (20, 0, 0, sum(len(key) * 1000 for key in keys))
        assert until(lambda: places(third, [*keys, "stays"]) == {b})
        assert ask("POST", "drain_jobs/query", {"job_id": job})[1]["status_name"] == "SUCCEEDED"
        assert ask("GET", f"segments/status?segment={a}")[1]["status_name"] == "DRAINED"
        assert ask("GET", f"segments/status?segment={c}")[1]["status_name"] == "OK"
        one.close()
        assert [third.get(key) for key in keys] == [key.encode() * 1000 for key in keys]
        # Nowhere to go: what cannot be moved stays.
        status, answer = ask("POST", "drain_jobs", {"segments": [b, c]})
        page = ended(ask, answer["job_id"])
        assert (page["status_name"], page["failed_units"]) == ("FAILED", 21)
        assert ask("GET", f"segments/status?segment={b}")[1]["status_name"] == "OK"
        assert third.get("stays") == b"x"
    finally:
        for store in (one, other, third):
            store.close()


def test_what_the_directory_hears_of_late_is_moved_too() -> None:
    """A put that its node has told nobody of when the job looks first."""
    looks = [{}, {b"late": object()}, {}, {}]
    moved: list[bytes] = []

    class Jobs(DrainJobs):
        def __init__(self) -> None:
            self._stop = threading.Event()

        def _held_at(self, store: Any, source: str) -> Any:
            return looks.pop(0)

        def _move(self, store: Any, job: Any, source: str, name: bytes, stat: Any) -> bool:
            moved.append(name)
            return True

    Jobs()._empty(None, SimpleNamespace(left=0, updated_ms=0, failed=0), "here")  # type: ignore[arg-type]
    assert (moved, looks) == ([b"late"], [])


# What the original answers: the status and the code.
REFUSED: list[tuple[Any, int, int]] = [
    (b"", 400, -600), (b"x", 400, -600), (b"\xff\xfe", 400, -600), ([], 400, -600), ({}, 400, -600),
    ({"segments": []}, 400, -600), ({"segments": "x"}, 400, -600), ({"segments": [5]}, 400, -600),
    ({"segments": ["nowhere:1"]}, 404, -101), ({"segments": ["HERE", "nowhere:1"]}, 404, -101),
    ({"segments": ["HERE"], "target_segments": ["nowhere:1"]}, 404, -101),
    ({"segments": ["HERE"], "target_segments": ["HERE"]}, 400, -600),
]  # fmt: skip


def test_jobs_that_cannot_be(pool: tuple[str, Ask]) -> None:
    address, ask = pool
    store = made(address, "127.0.0.1", 16 * MIB)
    try:
        for body, status, code in REFUSED:
            text = body if isinstance(body, bytes) else json.dumps(body).replace("HERE", store.get_hostname())
            answer = ask("POST", "drain_jobs", text if isinstance(text, bytes) else text.encode())
            assert (answer[0], answer[1]["success"], answer[1]["error_code"]) == (status, False, code), body
        for job, status, code in (("", 400, -600), ("x", 400, -600), ("1-2", 404, -1402)):
            answer = ask("GET", f"drain_jobs/query?job_id={job}")
            assert (answer[0], answer[1]["error_code"]) == (status, code)
        assert ask("GET", "drain_jobs")[0] == 405
        assert ask("POST", "drain_jobs", {"segments": [store.get_hostname()]}, token="wrong")[0] == 401
        assert ask("GET", f"segments/status?segment={store.get_hostname()}")[1]["status_name"] == "OK"
    finally:
        store.close()
