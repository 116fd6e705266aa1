"""The README's commands for prefill and decode, as they are printed there: KV events flow from the engines to
the proxy."""

from __future__ import annotations

import http.client
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.connectors.vllm.processes import environment
from tests.disagg_proxy.processes import fetch
from tests.ports import kept_port

ROOT = Path(__file__).parent.parent
TINY_MODEL = ROOT / "examples" / "demo" / "tiny_model.py"
START_S = 400.0
ENGINES = {"p": "8100", "d": "8200"}
# What a machine with two cores and a tiny model needs beside what the README says.
SMALL = (
    "--dtype float32 --max-model-len 4096 --block-size 32 --kv-cache-memory-bytes 67108864 --enforce-eager"
)


def printed() -> str:
    """The block of shell commands below its mark."""
    found = re.search(
        r"<!-- tests/test_readme\.py .*-->\n```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.S
    )
    assert found
    return found[1]


def commands(script: str) -> list[list[str]]:
    """The arguments of each command of the script, with its variables filled in."""
    show = r'show() { printf "%s\0" "$@"; printf "\1"; }'
    shown = f'{show}; vllm() {{ show vllm "$@"; }}; moonpool() {{ show moonpool "$@"; }}'
    out = subprocess.run(
        ["bash", "-c", f"{shown}\n{script.replace(' &', '')}"], capture_output=True, text=True, check=True
    ).stdout
    return [part.strip("\0").split("\0") for part in out.split("\1") if part]


def value(words: list[str], option: str) -> str:
    return words[words.index(option) + 1]


def test_the_proxy_listens_where_the_engines_publish() -> None:
    *engines, proxy = commands(printed())
    told = dict(word.split("=", 1) for word in proxy if re.match(r"[pd]=ipc:", word))
    addresses = dict(word.split("=", 1) for word in proxy if re.match(r"[pd]=http:", word))
    assert [words[:3] for words in engines] == [["vllm", "serve", "MODEL"]] * 2
    for (name, port), words in zip(ENGINES.items(), engines, strict=True):
        events = json.loads(value(words, "--kv-events-config"))
        # vLLM binds such an endpoint; one like tcp://127.0.0.1:5557 it would connect to, and publish to none.
        assert events["endpoint"].startswith("ipc://")
        assert f"{events['endpoint']},{events['replay_endpoint']}" == told[name]
        assert events["enable_kv_cache_events"] is True
        assert addresses[name] == f"http://127.0.0.1:{port}"
        assert value(words, "--port") == port
        assert json.loads(value(words, "--kv-transfer-config"))["kv_connector"] == "Mooncake"


@pytest.mark.engine
@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_the_printed_commands_make_events_flow(vllm_python: str, runtime_dir: Path, tmp_path: Path) -> None:
    model = tmp_path / "tiny"
    subprocess.run([sys.executable, TINY_MODEL, model], check=True)
    ports = {name: str(kept_port()) for name in (*ENGINES, "proxy")}
    script = printed().replace("MODEL", f"{shlex.quote(str(model))} {SMALL}")
    script = script.replace("/run/moonpool", str(runtime_dir))
    for name, port in ENGINES.items():
        script = script.replace(port, ports[name])
    script = script.replace("moonpool proxy", f"moonpool proxy --listen 127.0.0.1:{ports['proxy']}")
    bin_folders = [str(Path(python).parent) for python in (vllm_python, sys.executable)]
    env = {**environment(runtime_dir), "PATH": os.pathsep.join([*bin_folders, os.environ["PATH"]])}
    node = [sys.executable, "-m", "moonpool", "node", "--dram", "64MiB", "--http", "off", "--listen", "off"]
    log = tmp_path / "log"
    with ExitStack() as stack, log.open("wb") as output:
        for command in (node, ["bash", "-c", script]):
            process = subprocess.Popen(
                command,
                env=env,
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            stack.callback(process.wait, 60)
            stack.callback(os.killpg, process.pid, signal.SIGTERM)
        deadline_s = time.monotonic() + START_S
        address = ("127.0.0.1", int(ports["proxy"]))
        body = {"model": str(model), "prompt": "a" * 1000, "max_tokens": 2}
        answered, heard = False, 0.0
        while heard < len(ENGINES) or not answered:
            assert time.monotonic() < deadline_s, log.read_text(errors="replace")[-6000:]
            time.sleep(0.5)
            try:
                answered = answered or fetch(address, "POST", "/v1/completions", body)[0] == 200
                text = fetch(address, "GET", "/metrics")[2].decode()
            except (OSError, http.client.HTTPException):  # it is not there yet, or has too much to do
                continue
            heard = sum(
                sample.value >= 0 and answered
                for family in text_string_to_metric_families(text)
                for sample in family.samples
                if sample.name == "moonpool_proxy_events_sequence"
            )
