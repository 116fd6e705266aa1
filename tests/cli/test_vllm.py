"""`moonpool vllm`: our short options become vLLM's one JSON, and everything else stays as it was."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from moonpool.cli import run
from moonpool.core.errors import ConfigError
from moonpool.launch.vllm_command import FAIL_WARNING, KV_TRANSFER_CONFIG, find_vllm, translate

DEADLINE_S = 30


def transfer(arguments: tuple[str, ...]) -> dict[str, object]:
    made: dict[str, object] = json.loads(arguments[arguments.index(KV_TRANSFER_CONFIG) + 1])
    return made


def test_the_connector_becomes_the_json_and_the_rest_keeps_its_order() -> None:
    before = ["serve", "m", "--port", "8100"]
    after = ["-tp", "2", "--flag", "--kv-cache-dtype", "auto", "-O.level=3", "--no-x"]
    given = [*before, "--kv-connector", "Mooncake", *after]
    made = translate(given).arguments
    assert list(made[:-2]) == [*before, *after]
    assert transfer(made) == {
        "kv_connector": "Mooncake",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }


@pytest.mark.parametrize(
    "spelling",
    [
        ["--kv-role", "kv_producer"],
        ["--kv-role=kv_producer"],
        ["--kv_role", "kv_producer"],
        ["--kv_role=kv_producer"],
    ],
)
def test_options_may_be_spelt_as_vllm_spells_its_own(spelling: list[str]) -> None:
    made = translate(["serve", "m", *spelling]).arguments
    assert transfer(made)["kv_role"] == "kv_producer"
    assert len(made) == 4


def test_all_options() -> None:
    given = ["serve", "m", "--kv-node", "/run/n.sock", "--require-pool", "--kv-load-failure-policy", "fail"]
    made = translate(given)
    assert transfer(made.arguments) == {
        "kv_connector": "Mooncake",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"node": "/run/n.sock", "require_pool": True},
    }
    assert made.warnings == (FAIL_WARNING,)
    assert translate(["serve", "m"]).warnings == ()
    named = transfer(translate([*given, "--kv-connector", "Moonpool"]).arguments)
    assert named == transfer(made.arguments) | {"kv_connector": "Moonpool"}


def test_the_json_by_hand_goes_through_unchanged() -> None:
    for given in (
        ["serve", "m", KV_TRANSFER_CONFIG, "{}"],
        ["serve", "m", f"{KV_TRANSFER_CONFIG}={{}}"],
        ["serve", "m", "--kv-transfer-config.kv_role", "kv_both"],
    ):
        assert list(translate(given).arguments) == given


def test_other_subcommands_go_through_unchanged() -> None:
    given = ["bench", "throughput", "--kv-connector", "x"]
    assert list(translate(given).arguments) == given


def test_what_follows_two_dashes_is_not_ours() -> None:
    made = translate(["serve", "m", "--", "--kv-role", "x"]).arguments
    assert made[:2] == ("serve", "m")
    assert made[-3:] == ("--", "--kv-role", "x")
    assert KV_TRANSFER_CONFIG in made[2:4]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--kv-connector", "Mooncake", KV_TRANSFER_CONFIG, "{}"], "exclude each other"),
        (["--kv_transfer_config={}", "--require-pool"], "exclude each other"),
        (["--kv-conector", "Mooncake"], "did you mean --kv-connector?"),
        (["--require-pol"], "did you mean --require-pool?"),
        (["--kv-role"], "--kv-role needs a value"),
        (["--require-pool=yes"], "--require-pool takes no value"),
        (["--kv-load-failure-policy", "retry"], "must be one of recompute, fail"),
        (["--kv-connector", "NixlConnector", "--require-pool"], "needs --kv-connector Mooncake"),
    ],
)
def test_what_cannot_be_meant(given: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        translate(["serve", "m", *given])


def test_options_of_vllm_that_look_like_ours_are_left_alone() -> None:
    names = ("cache-dtype", "cache-memory-bytes", "events-config", "offloading-size", "sharing-fast-prefill")
    given = [f"--kv-{name}" for name in names]
    made = translate(["serve", "m", *given]).arguments
    assert list(made[2:-2]) == given


def test_a_dry_run_prints_the_command_and_the_warning(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["vllm", "serve", "a model", "--dry-run", "--kv-load-failure-policy", "fail"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith('vllm serve \'a model\' --kv-transfer-config \'{"kv_connector":"Mooncake"')
    assert captured.err == f"moonpool: warning: {FAIL_WARNING}\n"


def test_the_command_becomes_vllm(runtime: Path) -> None:
    program = runtime / "vllm"
    program.write_text('#!/bin/sh\necho "$$" "$@"\nexit 9\n')
    program.chmod(0o755)
    with subprocess.Popen(
        [sys.executable, "-m", "moonpool", "vllm", "--executable", str(program), "serve", "m", "--port", "1"],
        stdout=subprocess.PIPE,
    ) as process:
        out, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 9
    words = out.decode().split()
    assert words[0] == str(process.pid), "it runs in the same process, so that signals reach it"
    assert words[1:5] == ["serve", "m", "--port", "1"]


def test_where_vllm_is_looked_for(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beside, in_path = runtime / "bin" / "vllm", runtime / "path" / "vllm"
    for program in (beside, in_path):
        program.parent.mkdir()
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(beside.parent / "python"))
    assert find_vllm(path=str(in_path.parent)) == str(beside)
    beside.unlink()
    assert find_vllm(path=str(in_path.parent)) == str(in_path)
    in_path.unlink()
    with pytest.raises(ConfigError, match="there is no program vllm beside"):
        find_vllm(path=str(in_path.parent))
