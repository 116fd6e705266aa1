"""Where a model's config.json is found."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from moonpool.core.errors import ConfigError, Unavailable
from moonpool.disagg_proxy.tools.sizing.source import read_config

MODEL = "org/model"


@pytest.fixture(autouse=True)
def _no_hub_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HF_HUB_CACHE", "HF_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str | None]]]:
    """Has org/model, shows org/gated to nobody, and is ill for org/ill; (path, Authorization) of each."""
    asked: list[tuple[str, str | None]] = []
    answers = {"model": (200, b'{"from": "hub"}'), "gated": (403, b""), "ill": (500, b"")}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append((self.path, self.headers["Authorization"]))
            status, body = answers.get(self.path.split("/")[2], (404, b""))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        yield asked
        server.shutdown()


def test_a_file_and_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a": 1}')
    assert read_config(str(tmp_path)) == read_config(str(tmp_path / "config.json")) == {"a": 1}


def test_a_copy_of_the_hubs_tools_is_taken_first(tmp_path: Path, hub: list[object]) -> None:
    kept = tmp_path / "home" / "hub" / "models--org--model"
    for name in ("refs", "snapshots/abc"):
        (kept / name).mkdir(parents=True)
    (kept / "refs" / "main").write_text("abc\n")
    (kept / "snapshots" / "abc" / "config.json").write_text('{"from": "cache"}')
    assert read_config(MODEL) == {"from": "cache"}
    assert not hub
    (kept / "refs" / "main").write_text("other")
    assert read_config(MODEL) == {"from": "hub"}


def test_the_hub_is_asked(hub: list[tuple[str, str | None]], monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_config(MODEL) == {"from": "hub"}
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert read_config(MODEL) == {"from": "hub"}
    assert hub == [
        (f"/{MODEL}/resolve/main/config.json", None),
        (f"/{MODEL}/resolve/main/config.json", "Bearer secret"),
    ]
    with pytest.raises(ConfigError, match="HF_TOKEN"):
        read_config("org/gated")
    with pytest.raises(ConfigError, match="there is no org/other"):
        read_config("org/other")
    with pytest.raises(Unavailable, match="500"):
        read_config("org/ill")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE"):
        read_config(MODEL)


def test_a_hub_that_is_not_there(monkeypatch: pytest.MonkeyPatch, free_port: int) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free_port}")
    with pytest.raises(Unavailable, match="cannot be reached"):
        read_config(MODEL)


@pytest.mark.parametrize(
    ("text", "sentence"), [(b"{", "no JSON"), (b"[1]", "no JSON object"), (b"\xff\xfe\xfd", "no JSON")]
)
def test_a_file_that_is_none(tmp_path: Path, text: bytes, sentence: str) -> None:
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(ConfigError, match=sentence):
        read_config(str(tmp_path))


@pytest.mark.parametrize("name", ["nothing", "a/b/c", "../x", "a b/c"])
def test_neither_a_file_nor_a_name(name: str) -> None:
    with pytest.raises(ConfigError, match="no file or folder"):
        read_config(name)


def test_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        read_config(str(tmp_path))
