from __future__ import annotations

from pathlib import Path

import pytest

from moonpool.connectors.lmcache.settings import Settings
from moonpool.connectors.pinned_arena import ALL
from moonpool.core.config import paths
from moonpool.core.errors import ConfigError


@pytest.fixture(autouse=True)
def _runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("MOONPOOL_RUNTIME_DIR", str(tmp_path))


@pytest.mark.parametrize(
    "url", ["moonpool://", "moonpool:///", "moonpool://localhost", "moonpool://localhost/"]
)
def test_nothing_is_the_default_node(url: str) -> None:
    settings = Settings.from_url(url)
    assert settings == Settings()
    assert settings.socket() == paths.default_node_socket()


def test_a_url_names_node_and_space() -> None:
    settings = Settings.from_url(
        "moonpool://west?tenant=t&namespace=n&require_pool=true&threads=3&timeout_s=0.5&form=fp8_e4m3"
    )
    assert settings == Settings("west", True, "t", "n", 3, 0.5, "fp8_e4m3")
    assert settings.socket() == paths.node_socket("west")
    assert Settings.from_url("moonpool:///run/n.sock").socket() == Path("/run/n.sock")


def test_how_much_a_gpu_reads_in_place() -> None:
    assert Settings.from_url("moonpool://?gpu_pin=all").gpu_pin == ALL
    assert Settings.from_url("moonpool://?gpu_pin=16GiB").gpu_pin == 16 << 30
    with pytest.raises(ConfigError, match=r"adapter_params\.gpu_pin is an option of the remote connector"):
        Settings.of_server({"gpu_pin": "1GiB"}, "adapter_params")
    assert Settings.of_server({"gpu_pin": 0, "threads": 2}, "adapter_params").threads == 2


def test_options_as_json_has_them() -> None:
    assert Settings.parse({"node": "/n.sock", "require_pool": True, "threads": 4}, "here") == Settings(
        "/n.sock", require_pool=True, threads=4
    )


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("moonpool://10.0.0.1:7710", "a node of its own host"),
        ("moonpool://?tennant=t", "did you mean 'tenant'"),
        ("moonpool://?colour=red", "the options are node"),
        ("moonpool://?tenant=", "non-empty"),
        ("moonpool://?tenant=a&tenant=b", "stands twice"),
        ("moonpool://a?node=b", "stands twice"),
        ("moonpool://?require_pool=perhaps", "true or false"),
        ("moonpool://?threads=0", "1 to 64"),
        ("moonpool://?threads=1.5", "1 to 64"),
        ("moonpool://?threads=many", "must be a number"),
        ("moonpool://?timeout_s=0", "above 0"),
        ("moonpool://?timeout_s=nan", "above 0"),
        ("moonpool://?gpu_pin=some", 'must be 0, a size such as 16GiB, or "all"'),
        ("moonpool://?token=secret", "a secret has no place"),
        ("moonpool://user:secret@host", "a secret has no place"),
    ],
)
def test_what_is_wrong_is_said_without_the_secret(url: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        Settings.from_url(url)
    assert ":secret" not in str(caught.value)
    assert "=secret" not in str(caught.value)
