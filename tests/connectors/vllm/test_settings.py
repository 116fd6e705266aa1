"""kv_connector_extra_config: what it takes and what it says to what it does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from moonpool.connectors.pinned_arena import ALL
from moonpool.connectors.vllm.settings import Settings
from moonpool.core.errors import ConfigError


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("MOONPOOL_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def test_defaults() -> None:
    assert Settings.parse({}) == Settings(None, False, "default", "default", False)


def test_values() -> None:
    settings = Settings.parse(
        {"node": "n1", "require_pool": True, "tenant": "t", "namespace": "n", "save_decode": "true"}
    )
    assert settings == Settings("n1", True, "t", "n", True)
    assert Settings.parse({}).compute_if_faster
    assert not Settings.parse({"compute_if_faster": False}).compute_if_faster
    settings = Settings.parse({"gpu": False, "gpu_ring": "128MiB", "gpu_copy_threads": 8})
    assert (settings.gpu, settings.gpu_ring, settings.gpu_copy_threads) == (False, 128 << 20, 8)
    assert [Settings.parse({"gpu_pin": value}).gpu_pin for value in ("0", 0, "16GiB", "all")] == [
        0,
        0,
        16 << 30,
        ALL,
    ]


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"requirepool": True}, ["requirepool", "did you mean 'require_pool'?"]),
        ({"tenent": "x"}, ["did you mean 'tenant'?"]),
        ({"zzz": 1}, ["'zzz'", "the options are node, require_pool, tenant, namespace, save_decode"]),
        ({"token": "0xc0ffee"}, ["MOONPOOL_CLUSTER_TOKEN_FILE"]),
        ({"require_pool": "maybe"}, ["require_pool must be true or false, not 'maybe'"]),
        ({"save_decode": 1}, ["save_decode must be true or false"]),
        ({"tenant": ""}, ["tenant must be a non-empty text"]),
        ({"namespace": None}, ["namespace must be a non-empty text"]),
        ({"lease_s": 0}, ["lease_s must be seconds above 0 and up to 3600, not 0"]),
        ({"compute_if_faster": 2}, ["compute_if_faster must be true or false"]),
        ({"gpu": "cuda"}, ["gpu must be true or false"]),
        ({"gpu_ring": "1MiB"}, ["gpu_ring must be a size from 8MiB to 2GiB, such as 64MiB, not '1MiB'"]),
        ({"gpu_ring": "lots"}, ["gpu_ring must be a size", "not 'lots'"]),
        ({"gpu_copy_threads": 0}, ["gpu_copy_threads must be a number of threads from 1 to 64, not 0"]),
        ({"gpu_copy_threads": True}, ["gpu_copy_threads must be a number of threads"]),
        ({"gpu_pin": "some"}, ["gpu_pin must be 0, a size such as 16GiB, or \"all\", not 'some'"]),
        ({"gpu_pin": True}, ["gpu_pin must be", "not True"]),
        ({"gpu_pin": -1}, ["gpu_pin must be", "not -1"]),
    ],
)
def test_refusals(extra: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        Settings.parse(extra)
    assert all(word in str(refused.value) for word in words)
    assert "c0ffee" not in str(refused.value)


def test_sockets(runtime: Path) -> None:
    assert Settings().socket() == runtime / "node.sock"
    assert Settings(node="blue").socket() == runtime / "node-blue.sock"
    assert Settings(node="/tmp/x.sock").socket() == Path("/tmp/x.sock")
    with pytest.raises(ConfigError, match="a node of its own host"):
        Settings(node="10.0.0.1:7710").socket()
    with pytest.raises(ConfigError, match="shorter folder"):
        Settings(node="/" + "x" * 200).socket()
