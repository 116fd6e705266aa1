"""The kinds of engine that `moonpool up` starts, and what it says before and after."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from moonpool.cli import run
from moonpool.core.config import config, sections
from moonpool.core.errors import ConfigError
from moonpool.launch import up_plan

from ..core.store_bed import until

DEADLINE_S = 60


def planned(engines: list[sections.Engine], **more: object) -> up_plan.Plan:
    arguments: dict[str, Any] = {"up.engine": engines, "node.http": "off", "proxy.listen": "127.0.0.1:0"}
    return up_plan.plan(config.load(env={}, arguments=arguments | more), env={"PATH": os.environ["PATH"]})


def command_of(plan: up_plan.Plan, name: str) -> list[str]:
    return list(next(spec for spec in plan.specs if spec.name == name).command)


@pytest.mark.parametrize(
    ("role", "other", "more"),
    [
        ("prefill", "decode", {}),
        ("decode", "prefill", {}),
        ("prefill", "decode", {"proxy.prefill": ["http://127.0.0.1:9"]}),
    ],
)
def test_engines_of_one_role_are_refused_before_any_starts(
    runtime: Path, role: str, other: str, more: dict[str, object]
) -> None:
    """The proxy would refuse them, after each engine took a minute to start."""
    with pytest.raises(ConfigError, match=f"of the role {role} alone; .* role = '{other}'"):
        planned([sections.Engine(engine="mock", role=role)] * 2, **more)


@pytest.mark.parametrize(
    "more",
    [
        {"proxy.decode": ["http://127.0.0.1:9"]},
        {"proxy.engines": ["http://127.0.0.1:9"]},
        {"up.proxy": False},
    ],
)
def test_engines_of_one_role_beside_others_are_taken(runtime: Path, more: dict[str, object]) -> None:
    planned([sections.Engine(engine="mock", role="prefill")], **more).ports.release()


def test_an_sglang_engine_becomes_our_command(runtime: Path) -> None:
    engine = sections.Engine(
        engine="sglang",
        model="m",
        role="prefill",
        executable="/py",
        args=["--tp-size", "2"],
        require_pool=True,
    )
    plan = planned([engine, sections.Engine(engine="sglang", model="m", role="decode", kv_pool=False)])
    words = command_of(plan, "engine-0")
    ours, flags = words[: words.index("--")], words[words.index("--") + 1 :]
    assert ours[ours.index("sglang") :][:3] == ["sglang", "m", "--kv-pool"]
    assert ours[ours.index("--node") + 1] == str(runtime / "node-default.sock")
    assert ours[ours.index("--pd") + 1] == "prefill"
    assert ours[ours.index("--python") + 1] == "/py"
    assert "--require-pool" in ours
    assert flags[:3] == ["--host", "127.0.0.1", "--port"]
    assert flags[4:] == ["--tp-size", "2"]
    other = command_of(plan, "engine-1")
    assert "--kv-pool" not in other
    assert other[other.index("--pd") + 1] == "decode"
    plan.ports.release()


def test_mock_engines_need_no_model(runtime: Path) -> None:
    pair = [sections.Engine(engine="mock", role=role) for role in ("prefill", "decode")]
    plan = planned([*pair, sections.Engine(engine="mock", model="m", args=["--step-ms", "1"])])
    words = command_of(plan, "engine-2")
    assert words[words.index("mock-engine") :][:3] == ["mock-engine", "--host", "127.0.0.1"]
    assert words[words.index("--model") + 1] == "m"
    assert words[-2:] == ["--step-ms", "1"]
    assert command_of(plan, "proxy").count("--events") == 3  # the policy of such a fleet looks at prompts
    plan.ports.release()


def test_mock_and_a_model_exclude_each_other(runtime: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["up", "--mock", "2", "--model", "m"]) == 2
    assert "without a model" in capsys.readouterr().err


def test_up_says_what_to_do_next_and_that_works(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines without a model, and the request that is printed."""
    monkeypatch.setenv("MOONPOOL_NODE_HTTP", "127.0.0.1:0")
    command = [sys.executable, "-m", "moonpool", "up", "--mock", "2", "--listen", "127.0.0.1:0"]
    command += ["--dram", "16MiB"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            said: list[str] = []
            for line in process.stdout:
                said.append(line)
                if "watch it: moonpool status" in line:
                    break
            assert "watch it" in said[-1], "".join(said)
            line = next(line for line in said if "try it: curl" in line)
            words = line.split()
            url = words[words.index("curl") + 1]
            body = line[line.index("{") : line.rindex("}") + 1]
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(url, body.encode(), headers)

            def answered() -> bool:
                try:
                    with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
                        return bool(json.load(answer)["choices"][0]["text"])
                except urllib.error.HTTPError as error:  # engines that a machine stopped for a moment
                    if error.code != 503:
                        raise
                    return False

            until(answered, DEADLINE_S)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(DEADLINE_S)
