"""The embedding cache's store against a real node, and without one. test_contract.py has SGLang's factory."""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moonpool.connectors.sglang import compat
from moonpool.connectors.sglang.transfer import embeddings, hook, settings
from moonpool.connectors.sglang.transfer.embeddings import MoonpoolEmbeddings, space_of
from moonpool.core.errors import ConfigError
from tests.connectors.own_node import Node


class Config:
    """As Hugging Face's."""

    def __init__(self, **fields: Any) -> None:
        self.fields = {"hidden_size": 64, "_name_or_path": str(random.random()), **fields}
        self._commit_hash: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return self.fields


class Memory:
    def __init__(self, content: bytes) -> None:
        self.content = bytearray(content)
        self._held = ctypes.c_char.from_buffer(self.content)
        self.address = ctypes.addressof(self._held)


Open = Callable[[], MoonpoolEmbeddings]


@pytest.fixture
def model(folder: Path) -> Path:
    path = folder / "model"
    path.mkdir()
    (path / "model.safetensors").write_bytes(b"weights of this test")
    return path


@pytest.fixture
def open_store(node: Node, model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    monkeypatch.setenv(settings.NODE, str(node.socket))
    monkeypatch.setattr(
        compat, "server_args", lambda: SimpleNamespace(model_path=str(model), load_format="auto")
    )
    monkeypatch.setattr(
        compat, "model_config", lambda args: SimpleNamespace(hf_config=Config(), dtype="bf16")
    )
    made: list[MoonpoolEmbeddings] = []

    def make() -> MoonpoolEmbeddings:
        made.append(MoonpoolEmbeddings())
        return made[-1]

    yield make
    for store in made:
        store.close()


def test_another_encoder_finds_what_one_made(node: Node, open_store: Open, rng: random.Random) -> None:
    node.start()
    one, other = open_store(), open_store()
    memory = Memory(rng.randbytes(30_000))
    at = memory.address
    assert one.batch_put(["a", "b"], [at, at + 10_000], [10_000, 5_000]) == [True, True]
    assert one.batch_put_from_multi_buffers(["c"], [[at + 20_000, at, at + 15_000]], [[1_000, 0, 4_000]]) == [
        True
    ]
    assert other.batch_is_exist(["a", "x", "c"]) == [True, False, True]
    back = Memory(bytes(30_000))
    assert other.batch_get(["a", "x", "b"], [back.address + n * 10_000 for n in range(3)], [10_000] * 3) == [
        True,
        False,
        False,  # of another size: a miss
    ]
    assert back.content[:10_000] == memory.content[:10_000]
    back = Memory(bytes(30_000))
    pieces = [[back.address + 7_000, back.address], [back.address + 20_000]]
    assert other.batch_get_into_multi_buffers(["c", "b"], pieces, [[2_000, 3_000], [5_000]]) == [True, True]
    whole = memory.content[20_000:21_000] + memory.content[15_000:19_000]
    assert back.content[7_000:9_000] + back.content[:3_000] == whole
    assert back.content[20_000:25_000] == memory.content[10_000:15_000]


def test_one_that_is_too_large_spoils_no_other(node: Node, open_store: Open, rng: random.Random) -> None:
    node.start()
    store, memory = open_store(), Memory(rng.randbytes(2_000))
    assert store.batch_put(["a", "b"], [memory.address] * 2, [2_000, 1_000]) == [True, True]
    back = Memory(bytes(3_000))
    assert store.batch_get(["a", "b"], [back.address, back.address + 1_000], [1_000] * 2) == [False, True]
    assert back.content[1_000:2_000] == memory.content[:1_000]
    assert back.content[2_000:] == bytes(1_000)


def test_what_is_there_stays(node: Node, open_store: Open, rng: random.Random) -> None:
    node.start()
    store, memory = open_store(), Memory(rng.randbytes(2_000))
    for start in (0, 1_000):
        assert store.batch_put(["a"], [memory.address + start], [1_000]) == [True]
    back = Memory(bytes(1_000))
    assert store.batch_get(["a"], [back.address], [1_000]) == [True]
    assert back.content == memory.content[:1_000]


def test_no_node_then_one_then_none(
    node: Node, open_store: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(embeddings, "RETRY_S", 0.0)
    store, memory = open_store(), Memory(bytes(100))

    def works() -> list[bool]:
        here = [memory.address]
        return [
            *store.batch_put(["a"], here, [100]),
            *store.batch_is_exist(["a"]),
            *store.batch_get(["a"], here, [100]),
        ]

    assert works() == [False] * 3
    node.start()
    assert works() == [True] * 3
    node.stop()
    assert works() == [False] * 3
    warnings = [
        record.message for record in caplog.records if "no embeddings from the pool" in record.message
    ]
    assert len(warnings) == 2
    store.close()
    assert works() == [False] * 3


def test_a_full_pool_keeps_nothing_and_says_so(node: Node, open_store: Open) -> None:
    node.start(4 << 20)
    store, memory = open_store(), Memory(bytes(3 << 20))  # more than a quarter of the arena
    assert store.batch_put(["large", "small"], [memory.address] * 2, [3 << 20, 100]) == [False, True]
    assert store.batch_is_exist(["large", "small"]) == [False, True]


def test_two_models_never_share(model: Path) -> None:
    base = space_of(str(model), Config(), "bf16")
    assert space_of(str(model), Config(), "bf16") == base  # the name of the folder does not count
    spaces = {
        base,
        space_of(str(model), Config(hidden_size=65), "bf16"),
        space_of(str(model), Config(), "fp16"),
        space_of(str(model), Config(), "bf16", "dummy"),
        space_of(str(model), Config(), "bf16", counted={"quantisation": "fp8"}),
        space_of(str(model), Config(), "bf16", counted={"mm_process_config": {"image": {"max_pixels": 9}}}),
    }
    (model / "model.safetensors").write_bytes(b"weights of another test")
    spaces.add(space_of(str(model), Config(), "bf16"))
    hub = Config()
    with pytest.raises(ConfigError, match="which weights"):
        space_of("org/model", hub, "bf16")
    for commit in ("1" * 40, "2" * 40):
        hub._commit_hash = commit
        spaces.add(space_of("org/model", hub, "bf16"))
    assert len(spaces) == 9


def test_without_sglang_it_cannot_be_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang", None)
    monkeypatch.setenv(settings.EMBEDDINGS, "1")
    with pytest.raises(SystemExit, match="no embedding cache"):
        hook.register()


def test_a_socket_folder_that_may_not_be_read(
    node: Node, open_store: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    node.start()
    monkeypatch.setattr(embeddings, "RETRY_S", 0.0)
    usual = embeddings.Store

    def refused(*args: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied", str(node.socket))

    monkeypatch.setattr(embeddings, "Store", refused)
    store, memory = open_store(), Memory(bytes(10))
    assert store.batch_is_exist(["a"]) == store.batch_put(["a"], [memory.address], [10]) == [False]
    assert caplog.text.count("Permission denied") == 1
    monkeypatch.setattr(embeddings, "Store", usual)
    assert store.batch_put(["a"], [memory.address], [10]) == [True]
