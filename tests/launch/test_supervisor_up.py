"""`moonpool up` as a person runs it: one real command, and everything that it starts."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from moonpool.core.config import config, sections
from moonpool.core.errors import ConfigError
from moonpool.core.service.addresses import parse_address
from moonpool.launch import up_plan
from moonpool.launch.supervisor import Spec

from ..core.store_bed import until
from .up_bed import DEADLINE_S, Command, assert_gone, toml, watch


@pytest.fixture
def started(runtime: Path) -> Iterator[list[Command]]:
    """Commands that the test starts; whatever is left of them afterwards is killed."""
    commands: list[Command] = []
    yield commands
    for command in commands:
        command.kill()


def test_sigterm_takes_everything_down_children_of_children_included(
    runtime: Path, started: list[Command]
) -> None:
    command = Command(toml(runtime, engines=2))
    started.append(command)
    command.until("all is up")
    state = json.loads((runtime / "up.json").read_text())
    assert state["pid"] == command.process.pid
    assert state["ready"] is True
    assert [engine["name"] for engine in state["engines"]] == ["engine-0", "engine-1"]
    for engine in state["engines"]:
        assert urllib.request.urlopen(f"{engine['url']}/health", timeout=10).status == 200
        assert Path(engine["log"]).exists()
    tree = command.tree()
    assert len(tree) == 1 + 2 * 2
    watched = watch(tree)
    command.process.send_signal(signal.SIGTERM)
    assert command.wait() == 0
    assert_gone(watched)
    assert not (runtime / "up.json").exists()


@pytest.mark.parametrize("whom", ["keeper", "supervisor"])
def test_kill_9_of_up_leaves_nothing_behind(runtime: Path, started: list[Command], whom: str) -> None:
    command = Command(toml(runtime))
    started.append(command)
    command.until("all is up")
    tree = command.tree()
    assert len(tree) == 3
    watched = watch(tree)
    os.kill(command.process.pid if whom == "keeper" else tree[0], signal.SIGKILL)
    assert command.wait() == (-signal.SIGKILL if whom == "keeper" else 128 + signal.SIGKILL)
    assert_gone(watched)


def test_a_killed_engine_starts_again_at_its_address(runtime: Path, started: list[Command]) -> None:
    command = Command(toml(runtime))
    started.append(command)
    command.until("all is up")
    before = json.loads((runtime / "up.json").read_text())["engines"][0]
    os.kill(before["pid"], signal.SIGKILL)
    command.until("ready after", times=2)
    after = json.loads((runtime / "up.json").read_text())["engines"][0]
    assert after["url"] == before["url"]
    assert after["pid"] != before["pid"]
    assert after["restarts"] == 1
    assert "was killed by signal 9" in command.said


def test_a_second_up_in_the_same_folder_is_refused(runtime: Path, started: list[Command]) -> None:
    first = Command(toml(runtime))
    started.append(first)
    first.until("all is up")
    second = Command(toml(runtime))
    started.append(second)
    second.until("another moonpool up runs")
    assert second.wait() == 2
    assert json.loads((runtime / "up.json").read_text())["pid"] == first.process.pid


def test_an_engine_that_cannot_start_ends_up_with_its_log(runtime: Path, started: list[Command]) -> None:
    more = '[[up.engine]]\nname = "bad"\ncommand = ["sh", "-c", "echo no such model; exit 1"]\n'
    command = Command(toml(runtime, more=more))
    started.append(command)
    command.until("no such model")
    assert command.wait() == 3
    assert "moonpool: bad exited with code 1 3 times before it was ready" in command.said
    assert "Traceback" not in command.said


def test_the_whole_line_with_a_real_node_and_the_proxy(runtime: Path, started: list[Command]) -> None:
    pytest.importorskip("moonpool._native")
    command = Command(toml(runtime, engines=2, node=True, proxy=True))
    started.append(command)
    command.until("all is up")
    state = json.loads((runtime / "up.json").read_text())

    def is_well() -> bool:  # its data plane has a second to answer
        with suppress(urllib.error.HTTPError):
            page = urllib.request.urlopen(f"{state['node']['url']}/health", timeout=10)
            return bool(json.load(page)["status"] == "ok")
        return False

    until(is_well, DEADLINE_S)
    assert Path(state["node"]["socket"]).is_socket()
    page = json.load(urllib.request.urlopen(f"{state['proxy']['url']}/engines", timeout=10))
    assert [engine["name"] for engine in page["engines"]] == ["engine-0", "engine-1"]
    done = subprocess.run(
        [sys.executable, "-m", "moonpool", "status", "--json"],
        capture_output=True,
        timeout=DEADLINE_S,
        check=True,
    )
    status = json.loads(done.stdout)
    assert status["node"]["metrics"]["arena_bytes"] == 64 << 20
    assert len(status["engines"]) == 2
    watched = watch(command.tree())
    command.process.send_signal(signal.SIGINT)
    assert command.wait() == 0
    assert_gone(watched)
    assert not Path(state["node"]["socket"]).exists()


def test_two_nodes_each_with_its_pages_socket_and_counters(runtime: Path, started: list[Command]) -> None:
    pytest.importorskip("moonpool._native")
    more = '[[up.node]]\nname = "a"\n[[up.node]]\nname = "b"\ndram = "32MiB"\n'
    file = toml(runtime, more=more)
    file.write_text(file.read_text().replace("node = false\n", ""))
    command = Command(file)
    started.append(command)
    command.until("all is up")
    state = json.loads((runtime / "up.json").read_text())
    assert [node["name"] for node in state["nodes"]] == ["node-a", "node-b"]
    assert state["node"] == state["nodes"][0]
    assert state["master"] is None
    done = subprocess.run(
        [sys.executable, "-m", "moonpool", "status", "--json"],
        capture_output=True,
        timeout=DEADLINE_S,
        check=True,
    )
    status = json.loads(done.stdout)
    assert [(node["name"], node["metrics"]["arena_bytes"]) for node in status["nodes"]] == [
        ("a", 64 << 20),
        ("b", 32 << 20),
    ]
    first, second = state["nodes"]
    assert Path(os.readlink(runtime / "node.sock")).name in ("node-a.sock", "node-b.sock")
    os.kill(second["pid"], signal.SIGKILL)
    command.until("node-b: ready after", times=2)
    again = json.loads((runtime / "up.json").read_text())["nodes"]
    assert again[0]["pid"] == first["pid"]
    assert (again[1]["url"], again[1]["restarts"]) == (second["url"], 1)
    command.process.send_signal(signal.SIGTERM)
    assert command.wait() == 0
    assert not Path(first["socket"]).exists()


def planned(engine: sections.Engine, **more: object) -> up_plan.Plan:
    arguments: dict[str, object] = {
        "up.engine": [engine],
        "node.http": "127.0.0.1:0",
        "proxy.listen": "127.0.0.1:0",
    }
    return up_plan.plan(config.load(env={}, arguments=arguments | more), env={"PATH": os.environ["PATH"]})


def plan_of(folder: Path, text: str) -> up_plan.Plan:
    """What a config file makes; every port is a free one unless the text says otherwise."""
    file = folder / "plan.toml"
    file.write_text(text)
    env = {"MOONPOOL_PROXY_LISTEN": "127.0.0.1:0"}
    return up_plan.plan(config.load(file, env=env), config_file=str(file), env={"PATH": os.environ["PATH"]})


def option(spec: Spec, name: str) -> str:
    return spec.command[spec.command.index(name) + 1]


def spec_of(plan: up_plan.Plan, name: str) -> Spec:
    return next(spec for spec in plan.specs if spec.name == name)


@pytest.fixture
def vllm(runtime: Path) -> str:
    program = runtime / "vllm"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    return str(program)


def test_a_vllm_engine_joins_the_pool_by_itself(runtime: Path, vllm: str) -> None:
    plan = planned(
        sections.Engine(model="some/model", executable=vllm, args=["--max-model-len", "512"], port=0)
    )
    engine = spec_of(plan, "engine-0")
    words = list(engine.command)
    assert words[:3] == [vllm, "serve", "some/model"]
    assert words[words.index("--max-model-len") + 1] == "512"
    transfer = json.loads(words[words.index("--kv-transfer-config") + 1])
    assert transfer == {
        "kv_connector": "Mooncake",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"node": str(runtime / "node-default.sock")},
    }
    port = words[words.index("--port") + 1]
    assert int(port) > 0
    proxy = spec_of(plan, "proxy").command
    assert proxy[proxy.index("--engine") + 1] == f"engine-0=http://127.0.0.1:{port}"
    assert len({spec.url for spec in plan.specs}) == 3


def test_without_kv_pool_or_with_a_config_of_its_own_nothing_is_added(runtime: Path, vllm: str) -> None:
    plain = spec_of(planned(sections.Engine(model="m", executable=vllm, kv_pool=False)), "engine-0")
    assert "--kv-transfer-config" not in plain.command
    own = spec_of(
        planned(sections.Engine(model="m", executable=vllm, args=["--kv-transfer-config={}"])), "engine-0"
    )
    assert sum("--kv-transfer-config" in word for word in own.command) == 1


def test_the_environment_of_an_engine(runtime: Path, vllm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(up_plan, "has_gpu", lambda env: False)
    given = sections.Engine(model=str(runtime), executable=vllm, env={"OMP_NUM_THREADS": "7", "EXTRA": "1"})
    arguments: dict[str, object] = {"up.engine": [given], "node.http": "off", "up.proxy": False}
    base = {"PATH": "/bin", "PYTHONDONTWRITEBYTECODE": "1", "VLLM_HOST_IP": "10.0.0.1"}
    env = spec_of(up_plan.plan(config.load(env={}, arguments=arguments), env=base), "engine-0").env
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert env["OMP_NUM_THREADS"] == "7"
    assert env["EXTRA"] == "1"
    assert env["VLLM_HOST_IP"] == "10.0.0.1"
    assert env["HF_HUB_OFFLINE"] == "1"
    assert "PYTHONDONTWRITEBYTECODE" not in env
    assert env["PATH"].split(":")[0] == str(Path(vllm).parent)
    remote = sections.Engine(model="some/model", executable=vllm)
    env = spec_of(planned(remote), "engine-0").env
    assert "HF_HUB_OFFLINE" not in env


def test_a_token_file_reaches_every_process_by_the_environment(runtime: Path, vllm: str) -> None:
    plan = planned(sections.Engine(model="m", executable=vllm), **{"cluster.token_file": "secret"})
    for spec in plan.specs:
        assert spec.env["MOONPOOL_CLUSTER_TOKEN_FILE"] == str(Path("secret").absolute())
        assert not any("secret" in word for word in spec.command)


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (sections.Engine(), r"up.engine\[0\] needs a model or a command"),
        (sections.Engine(command=["x"], model="m"), "exclude each other"),
        (sections.Engine(model="m", executable="/no/vllm"), "there is no program /no/vllm"),
        (sections.Engine(command=["x"], name="proxy"), "proxy is taken"),
        (sections.Engine(command=["x"], health="health"), "must start with /"),
        (sections.Engine(command=["x"], host="203.0.113.7"), "address 203.0.113.7:0 cannot be used"),
    ],
)
def test_an_engine_that_cannot_be_meant(runtime: Path, engine: sections.Engine, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        planned(engine)


def test_ports_among_the_arguments_are_refused(runtime: Path, vllm: str) -> None:
    with pytest.raises(ConfigError, match=r"must not hold --port; use up.engine\[0\].port"):
        planned(sections.Engine(model="m", executable=vllm, args=["--port=1"]))


TWO_NODES = """
[node]
dram = "64MiB"
[up]
master = true
[[up.node]]
name = "a"
[[up.node]]
name = "b"
dram = "32MiB"
host_id = "elsewhere"
ssd = ["/tmp/x:1GiB"]
env = { MOONPOOL_NODE_SLAB_BYTES = "1MiB" }
[[up.engine]]
command = ["x", "{node}"]
node = "b"
[[up.engine]]
command = ["x", "{node}"]
[[up.engine]]
command = ["x", "{node}"]
"""


def test_several_nodes_join_the_master_and_engines_are_spread_over_them(runtime: Path) -> None:
    plan = plan_of(runtime, TWO_NODES)
    assert [spec.name for spec in plan.specs] == [
        "master", "node-a", "node-b", "engine-0", "engine-1", "engine-2", "proxy",
    ]  # fmt: skip
    assert [spec.stage for spec in plan.specs] == sorted(spec.stage for spec in plan.specs)
    assert [spec.is_base for spec in plan.specs] == [True] * 3 + [False] * 4
    master, a, b = plan.specs[:3]
    assert master.command[-3:] == ("master", "--config", str(runtime / "plan.toml"))
    for node in (a, b):
        assert option(node, "--master") == master.env["MOONPOOL_MASTER_LISTEN"]
        assert int(option(node, "--listen").rpartition(":")[2]) > 0
    assert (option(a, "--dram"), option(b, "--dram")) == (str(64 << 20), str(32 << 20))
    assert "--host-id" not in a.command
    assert option(b, "--host-id") == "elsewhere"
    assert option(b, "--ssd") == "/tmp/x:1GiB"
    assert "--ssd" not in a.command
    assert b.env["MOONPOOL_NODE_SLAB_BYTES"] == "1MiB"
    assert "MOONPOOL_NODE_SLAB_BYTES" not in a.env
    urls = [spec.url for spec in plan.specs]
    assert len(set(urls)) == len(urls)
    sockets = [str(runtime / f"node-{name}.sock") for name in ("b", "b", "a")]
    assert [spec_of(plan, f"engine-{index}").command[1] for index in range(3)] == sockets
    assert plan.sockets == {"node-a": sockets[2], "node-b": sockets[0]}


def test_roles_reach_the_proxy_beside_the_engines_that_it_names_itself(runtime: Path) -> None:
    tables = "".join(
        f'[[up.engine]]\nname = "{name}"\nrole = "{role}"\ncommand = ["x"]\n'
        for name, role in (("p", "prefill"), ("d", "decode"), ("b", "both"))
    )
    file = runtime / "roles.toml"
    file.write_text(f'[proxy]\ndecode = ["far=http://10.0.0.9:8000"]\n[up]\nnode = false\n{tables}')
    made = up_plan.plan(config.load(file, env={}), env={})
    urls = {spec.name: spec.url for spec in made.specs}
    command = made.specs[-1].command
    options = set(itertools.pairwise(command))
    for option, value in (
        ("--prefill", f"p={urls['p']}"),
        ("--decode", "far=http://10.0.0.9:8000"),
        ("--decode", f"d={urls['d']}"),
        ("--engine", f"b={urls['b']}"),
    ):
        assert (option, value) in options


def options_of(spec: Spec, name: str) -> list[str]:
    return [value for option, value in itertools.pairwise(spec.command) if option == name]


def test_a_policy_that_looks_at_prompts_hears_of_every_block(runtime: Path, vllm: str) -> None:
    """vLLM engines and nodes publish where the proxy listens; who has a stream of its own keeps it."""
    tables = "".join(
        f'[[up.engine]]\nname = "{name}"\nrole = "{role}"\nmodel = "m"\nexecutable = "{vllm}"\n{more}\n'
        for name, role, more in (
            ("p", "prefill", ""),
            ("d", "decode", ""),
            ("own", "decode", 'args = ["--kv-events-config", "{}"]'),
            ("ranks", "decode", 'args = ["--data-parallel-size=2"]'),
            ("silent", "decode", "kv_events = false"),
        )
    )
    nodes = '[[up.node]]\nname = "a"\n[[up.node]]\nname = "b"\n'
    given = '[proxy]\nevents = ["own=tcp://10.0.0.9:5557"]\n'
    plan = plan_of(runtime, given + nodes + tables)
    proxy = spec_of(plan, "proxy")

    def streams(name: str) -> str:
        return f"ipc://{runtime}/events-{name}.sock,ipc://{runtime}/events-{name}-replay.sock"

    assert options_of(proxy, "--events") == [
        "own=tcp://10.0.0.9:5557",
        f"p={streams('p')}",
        f"d={streams('d')}",
    ]
    assert options_of(proxy, "--pool-events") == []  # the proxy finds the nodes
    for name in ("p", "d"):
        told = json.loads(option(spec_of(plan, name), "--kv-events-config"))
        assert f"{told['endpoint']},{told['replay_endpoint']}" == streams(name)
        assert told["enable_kv_cache_events"] is True
        assert "--enable-prompt-tokens-details" in spec_of(plan, name).command
    for name in ("own", "ranks", "silent"):
        assert "--enable-prompt-tokens-details" not in spec_of(plan, name).command
    assert "--events" not in spec_of(plan, "node-a").command  # it publishes by default


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", True),  # a node is started, which the proxy hears
        ('[proxy]\npool = "none"\n', False),
        ('[node]\nevents = "none"\n', False),
        ("[up]\nnode = false\n", False),
        ('[proxy]\npolicy = "conductor"\n', True),
        ('[proxy]\ndecode = ["http://10.0.0.9:8000"]\nprefill = ["http://10.0.0.9:8001"]\n', True),
        ('[proxy]\npolicy = "least_load"\nevents = ["far=tcp://10.0.0.9:5557"]\n', False),
        ('[up]\nproxy = false\n[proxy]\npolicy = "conductor"\n', False),
    ],
)
def test_nobody_tells_what_nobody_looks_at(runtime: Path, vllm: str, text: str, expected: bool) -> None:
    engine = f'[[up.engine]]\nmodel = "m"\nexecutable = "{vllm}"\n'
    plan = plan_of(runtime, text + engine)
    assert ("--kv-events-config" in spec_of(plan, "engine-0").command) is expected
    if "policy" not in text:  # else the file says it; a proxy that starts again keeps the choice
        assert options_of(spec_of(plan, "proxy"), "--policy") == ["conductor"] * expected


def test_one_table_is_one_node_and_old_forms_stand(runtime: Path) -> None:
    engine = '[[up.engine]]\ncommand = ["x", "{node}"]\n'
    assert plan_of(runtime, "[[up.node]]\n" + engine).specs[0].name == "node-0"
    plain = plan_of(runtime, engine)
    assert [spec.name for spec in plain.specs] == ["node", "engine-0", "proxy"]
    assert "--master" not in spec_of(plain, "node").command
    without = plan_of(runtime, "[up]\nnode = false\n" + engine)
    assert [spec.name for spec in without.specs] == ["engine-0", "proxy"]
    assert without.specs[0].command[1] == str(runtime / "node-default.sock")


def test_nodes_join_the_master_of_another_host(runtime: Path) -> None:
    secret = runtime / "secret"
    secret.touch(0o600)
    secret.write_text("chosen by a person")
    text = f'[cluster]\nmaster = "10.0.0.1:7700"\ntoken_file = "{secret}"\n[node]\nlisten = "0.0.0.0:0"\n'
    plan = plan_of(runtime, text + '[[up.engine]]\ncommand = ["x"]\n')
    assert option(spec_of(plan, "node"), "--master") == "10.0.0.1:7700"
    assert option(spec_of(plan, "node"), "--listen").startswith("0.0.0.0:")
    with pytest.raises(
        ConfigError, match=r"up.master starts a master, and cluster.master names 10.0.0.1:7700"
    ):
        plan_of(runtime, text + '[up]\nmaster = true\n[[up.engine]]\ncommand = ["x"]\n')


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[[up.node]]\nname = "a"\n[[up.node]]\nname = "a"\n', r"up.node\[1\].name node-a is taken"),
        (
            '[[up.node]]\nname = "a"\n[[up.engine]]\ncommand = ["x"]\nnode = "b"\n',
            r"up.engine\[0\].node = 'b' is no node of this file; its nodes: a",
        ),
        ('[node]\nsocket = "/tmp/x.sock"\n[[up.node]]\n[[up.node]]\n', "names one socket for 2 nodes"),
        ('[node]\nssd = ["/tmp/x:1GiB"]\n[[up.node]]\n[[up.node]]\n', "node.ssd names directories for 2"),
        ('[[up.node]]\nname = "a b"\n', "node name 'a b' must be"),
        ('[[up.node]]\nlisten = "0.0.0.0:0"\n', r"up.node\[0\].listen = .* needs a cluster token"),
        ('[master]\nlisten = "0.0.0.0:0"\n[up]\nmaster = true\n', "master.listen = .* needs a cluster token"),
    ],
)
def test_nodes_that_cannot_be_meant(runtime: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_of(runtime, text + '[[up.engine]]\ncommand = ["x"]\n')


def test_a_default_port_that_is_taken_is_no_hindrance(runtime: Path) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        address = f"127.0.0.1:{busy.getsockname()[1]}"
        made = config.load(env={}, arguments={"proxy.listen": "127.0.0.1:0"})
        default = msgspec.structs.replace(
            made,
            node=msgspec.structs.replace(made.node, http=address),
            up=msgspec.structs.replace(made.up, engine=[sections.Engine(command=["x"])]),
        )
        node = spec_of(up_plan.plan(default, env={}), "node")
        assert option(node, "--http") not in (address, "off")
        with pytest.raises(ConfigError, match=f"node.http: address {address} cannot be used"):
            planned(sections.Engine(command=["x"]), **{"node.http": address})


def test_a_port_in_use_is_refused_before_anything_starts(runtime: Path) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        with pytest.raises(
            ConfigError, match=rf"up.engine\[0\].port: address 127.0.0.1:{port} cannot be used"
        ):
            planned(sections.Engine(command=["x"], port=port))


def test_a_planned_port_is_given_to_nobody_else_until_its_process_listens(runtime: Path, vllm: str) -> None:
    """An engine takes a minute to get there, and comes back after a crash."""
    plan = planned(sections.Engine(model="m", executable=vllm))
    address = parse_address(spec_of(plan, "engine-0").url.removeprefix("http://"), "url")
    with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
        stranger.bind(address)
    for _ in range(2):
        socket.create_server(address).close()  # sets SO_REUSEADDR
    plan.ports.release()
    with socket.socket() as stranger:
        stranger.bind(address)


def test_the_port_of_a_command_is_free_for_it_whatever_it_sets(runtime: Path) -> None:
    plan = planned(sections.Engine(command=["x"]))
    with socket.socket() as server:
        server.bind(parse_address(spec_of(plan, "engine-0").url.removeprefix("http://"), "url"))


def test_nothing_to_run_is_one_sentence(runtime: Path) -> None:
    with pytest.raises(ConfigError, match="there is no engine to start"):
        up_plan.plan(config.load(env={}), env={})
