"""`moonpool sglang`: the pool and the hand-over become SGLang's flags, and the user's own go before ours."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from moonpool.cli import run
from moonpool.connectors.sglang.extra_config import EXTRA_CONFIG, completed
from moonpool.core.errors import ConfigError
from moonpool.launch.sglang_command import Found, Server, find_python, look

DEADLINE_S = 30
POOL = {
    "backend_name": "moonpool",
    "module_path": "moonpool.connectors.sglang",
    "class_name": "MoonpoolHiCache",
    "interface_v1": 1,
    "hicache_storage_pass_prefix_keys": True,
}


def extra(arguments: list[str]) -> dict[str, object]:
    assert arguments[-2] == EXTRA_CONFIG
    made: dict[str, object] = json.loads(arguments[-1])
    return made


def test_the_pool() -> None:
    made = Server("m", kv_pool=True, flags=("--port", "1")).arguments()
    assert made[:2] == ["--model-path", "m"]
    assert made[-4:-2] == ["--port", "1"]
    assert made[2:-4] == [
        *("--page-size", "64"),
        "--enable-hierarchical-cache",
        *("--hicache-mem-layout", "page_first_direct"),
        *("--hicache-io-backend", "direct"),
        *("--hicache-storage-backend", "dynamic"),
    ]
    assert extra(made) == POOL


def test_node_and_require_pool() -> None:
    made = Server("m", kv_pool=True, node="/run/n.sock", require_pool=True).arguments()
    assert extra(made) == {**POOL, "node": "/run/n.sock", "require_pool": True}
    given = (EXTRA_CONFIG, '{"prefetch_threshold": 64, "node": "other"}')
    both = Server("m", kv_pool=True, node="mine", flags=given).arguments()
    assert extra(both) == {**POOL, "prefetch_threshold": 64, "node": "mine"}, (
        "the last one is what SGLang takes"
    )


@pytest.mark.parametrize(
    ("given", "layout", "io"),
    [
        (["--hicache-io-backend", "kernel"], "page_first", None),
        (["--hicache-io-backend=direct"], "page_first_direct", None),
        (["--hicache-mem-layout", "page_head"], None, "kernel"),
        (["--hicache_mem_layout=layer_first"], None, "direct"),
        (["--hicache-mem-layout", "page_first", "--hicache-io-backend", "kernel"], None, None),
    ],
)
def test_layout_and_copies_fit_what_is_given(given: list[str], layout: str | None, io: str | None) -> None:
    made = Server("m", kv_pool=True, flags=tuple(given)).arguments()
    ours = made[: -len(given) - 2]
    for flag, value in (("--hicache-mem-layout", layout), ("--hicache-io-backend", io)):
        assert (ours[ours.index(flag) + 1] if flag in ours else None) == value


def test_the_page_size_that_is_given_stays() -> None:
    for given in (("--page-size", "16"), ("--page-size=16",), ("--page_size", "16")):
        made = Server("m", kv_pool=True, flags=given).arguments()
        assert tuple(made[-len(given) - 2 : -2]) == given
        assert "64" not in made


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_a_hand_over(mode: str) -> None:
    server = Server("m", pd=mode)
    assert server.environment() == {"MOONPOOL_SGLANG_PD": "1"}
    assert server.arguments() == [
        *("--model-path", "m"),
        *("--page-size", "64"),
        *("--disaggregation-mode", mode),
        *("--disaggregation-transfer-backend", "mooncake"),
    ]
    both = Server("m", pd=mode, kv_pool=True).arguments()
    assert EXTRA_CONFIG in both
    assert "--disaggregation-mode" in both
    tiers, offload = "--enable-hierarchical-cache", "--disaggregation-decode-enable-offload-kvcache"
    assert (tiers in both, offload in both) == (mode == "prefill", mode == "decode")
    cached = ("--disaggregation-decode-enable-radix-cache",)
    assert tiers in Server("m", pd=mode, kv_pool=True, flags=cached).arguments()


def test_without_either_it_is_sglang_as_it_is() -> None:
    server = Server("m", flags=("--port", "1"))
    assert server.arguments() == ["--model-path", "m", "--port", "1"]
    assert server.environment() == {}


@pytest.mark.parametrize(
    ("server", "message"),
    [
        (Server("m", node="n"), "--node needs --kv-pool"),
        (Server("m", require_pool=True), "--require-pool needs --kv-pool"),
        (Server("m", kv_pool=True, flags=("--hicache-storage-backend=file",)), "exclude each other"),
        (
            Server("m", kv_pool=True, flags=(EXTRA_CONFIG, "@file.json")),
            "must be a JSON object beside --kv-pool",
        ),
        (Server("m", kv_pool=True, flags=(EXTRA_CONFIG, "[]")), "must be a JSON object beside --kv-pool"),
        (Server("m", kv_pool=True, flags=(EXTRA_CONFIG, '{"class_name":"X"}')), "class_name is 'X'"),
        (Server("m", pd="both"), "--pd must be one of prefill, decode, not 'both'"),
        (Server("m", pd="prefill", flags=("--disaggregation-mode", "decode")), "give one of them"),
        (Server("m", pd="decode", flags=("--disaggregation-transfer-backend=nixl",)), "exclude each other"),
    ],
)
def test_what_cannot_be_meant(server: Server, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        server.arguments()


def test_another_class_is_not_ours() -> None:
    assert completed({"node": "n"}) == {**POOL, "node": "n"}
    assert completed({"hicache_storage_pass_prefix_keys": False})["hicache_storage_pass_prefix_keys"] is False
    with pytest.raises(ConfigError, match="class_name is 'Other', not 'MoonpoolHiCache'"):
        completed({"class_name": "Other"})


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (Found(None), "there is no SGLang in python3"),
        (Found("0.5.17"), "SGLang 0.5.17 is too old for moonpool, which needs 0.5.18 or newer"),
        (Found("0.5.23", moonpool=False), "there is no moonpool in python3"),
        (Found("0.5.23", plugin=False), "its own transfer engine would run"),
    ],
)
def test_a_python_that_will_not_do(found: Found, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        found.check(python="python3", pd=True)


@pytest.mark.parametrize("version", ["", "0.5.18", "0.5.23.post1", "0.6.0rc1", "1.0.0"])
def test_a_python_that_will(version: str) -> None:
    Found(version).check(python="python3", pd=True)
    Found(version, plugin=False).check(python="python3", pd=False)


def environment_with(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python that has an SGLang, as far as its metadata says so, and our plugin."""
    for name, version in (("sglang", "0.5.23"), ("other", "1")):
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (folder / "other-1.dist-info" / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\nmoonpool = os:getcwd\n"
    )
    package = folder / "sglang"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "launch_server.py").write_text(
        "import os, sys\nprint(os.getpid(), os.environ['MOONPOOL_SGLANG_PD'], *sys.argv[1:])\nsys.exit(9)\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{Path(__file__).parents[2] / 'src'}")


def test_what_a_python_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment_with(tmp_path, monkeypatch)
    assert look(sys.executable) == Found("0.5.23")
    monkeypatch.setenv("SGLANG_PLUGINS", "one, two")
    assert not look(sys.executable).plugin
    monkeypatch.setenv("SGLANG_PLUGINS", "one, moonpool")
    assert look(sys.executable).plugin
    with pytest.raises(ConfigError, match="does not run as a Python"):
        look("/bin/false")
    with pytest.raises(ConfigError, match="there is no program no-such-python"):
        find_python("no-such-python")


def test_the_command_becomes_sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment_with(tmp_path, monkeypatch)
    command = [sys.executable, "-m", "moonpool", "sglang", "m", "--pd", "decode", "--", "--port", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        out, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 9
    words = out.decode().split()
    assert words[:4] == [str(process.pid), "1", "--model-path", "m"]
    assert words[-2:] == ["--port", "1"]


def test_a_dry_run_prints_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["sglang", "a model", "--pd", "prefill", "--dry-run", "--", "--port", "1"]) == 0
    assert capsys.readouterr().out == (
        "MOONPOOL_SGLANG_PD=1 python -m sglang.launch_server --model-path 'a model' --page-size 64 "
        "--disaggregation-mode prefill --disaggregation-transfer-backend mooncake --port 1\n"
    )


def test_flags_without_the_dashes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["sglang", "m", "--tp-size", "2", "--dry-run", "--nnodes", "2", "--node-rank=1"]) == 0
    assert capsys.readouterr().out.endswith("--model-path m --tp-size 2 --nnodes 2 --node-rank=1\n")
    assert run(["sglang", "m", "--kv-pol", "--dry-run"]) == 2
    assert "did you mean --kv-pool?" in capsys.readouterr().err


def test_a_shortened_extra_config_is_not_dropped() -> None:
    flags = (EXTRA_CONFIG[:-4] + '={"prefetch_threshold":64}',)
    with pytest.raises(ConfigError, match=f"must be written out: {EXTRA_CONFIG}"):
        Server("m", kv_pool=True, flags=flags).arguments()


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["sglang", "--help"]) == 0
    assert "moonpool sglang MODEL --kv-pool --dry-run" in " ".join(capsys.readouterr().out.split())
