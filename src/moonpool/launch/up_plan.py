"""What `moonpool up` is to run: of a Config the processes with real ports, commands, environments and logs.

    master (up.master)     joined by the nodes
    nodes                  none, the one of [node], or one for each table [[up.node]]
    engines                each joins the node that it names, else the nodes in turn
    proxy                  in front of all engines

Where the proxy's policy looks at prompts, nodes and vLLM engines publish their KV events in the runtime
folder, and the proxy follows them.

Nothing is started here. Ports are held while the plan is made, so that no two processes get the same.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from moonpool.core.config import paths
from moonpool.core.config.config import Config
from moonpool.core.config.sections import Engine, Up, UpNode
from moonpool.core.errors import ConfigError, Unavailable
from moonpool.core.service.addresses import Address, parse_address
from moonpool.core.service.http_get import accepts, answers_ok, get_json
from moonpool.core.service.http_tls import own_child_context, scheme
from moonpool.core.service.listen_addresses import OFF, advertised_address, master_text, require_token
from moonpool.core.service.node_socket import is_served
from moonpool.core.service.published_events import publishes_events
from moonpool.disagg_proxy.conductor.policy import make_policy
from moonpool.disagg_proxy.from_config import policy_of
from moonpool.launch.held_ports import HeldPorts
from moonpool.launch.supervisor import Spec
from moonpool.launch.vllm_command import KV_TRANSFER_CONFIG, Pool, engine_environment, find_vllm, has_gpu

MASTER_STAGE, NODE_STAGE, ENGINE_STAGE, PROXY_STAGE = range(4)
MOONPOOL = (
    sys.executable,
    "-P",
    "-m",
    "moonpool",
)  # -P: a folder of that name in the working folder is not ours
KV_EVENTS_CONFIG = "--kv-events-config"
# vLLM's options that keep us from giving it a stream: it has one, or each of several ranks wants its own.
OWN_EVENTS = {KV_EVENTS_CONFIG, "--data-parallel-size", "-dp"}


@dataclass(frozen=True)
class Plan:
    """What is to run; ``models`` and ``sockets`` by the name of the process, ``ports`` of all."""

    specs: tuple[Spec, ...]
    log_dir: Path
    limits: Up
    ports: HeldPorts
    models: Mapping[str, str] = field(default_factory=dict)
    sockets: Mapping[str, str] = field(default_factory=dict)


def plan(config: Config, *, config_file: str = "", env: Mapping[str, str] | None = None) -> Plan:
    """Decides addresses and commands. Takes free ports where 0 is asked for. Raises ConfigError for what
    cannot run.
    """
    env = dict(os.environ if env is None else env)
    up = config.up
    if not (up.engine or config.proxy.engines or config.proxy.decode) and up.proxy:
        raise ConfigError(
            "there is no engine to start: add a table [[up.engine]] to the config file, or give --model; "
            "--mock 2 starts two engines without a model",
            operation="up",
            key="up.engine",
        )
    if up.proxy:
        _check_roles(config)
    for name in ("token_file", "admin_token_file"):
        if file := getattr(config.cluster, name):
            env[f"MOONPOOL_CLUSTER_{name.upper()}"] = str(Path(file).absolute())
            env.pop(f"MOONPOOL_CLUSTER_{name.upper().removesuffix('_FILE')}", None)
    runtime = paths.runtime_dir(ensure=True)
    log_dir = Path(up.log_dir).absolute() if up.log_dir else runtime / "logs"
    _make_folder(log_dir)
    ports = HeldPorts()
    planner = _Planner(config, config_file, env, log_dir, ports)
    try:
        specs = planner.all()
        ports.settle()
    except BaseException:
        ports.release()
        raise
    return Plan(tuple(specs), log_dir, up, ports, planner.models, planner.sockets)


class _Planner:
    """Makes the specs in the order of their stages; what one stage decides, the next one reads."""

    def __init__(
        self, config: Config, config_file: str, env: Mapping[str, str], log_dir: Path, ports: HeldPorts
    ) -> None:
        self.config = config
        self.models: dict[str, str] = {}
        self.sockets: dict[str, str] = {}
        self._config_option = ["--config", str(Path(config_file).absolute())] if config_file else []
        self._env = env
        self._log_dir = log_dir
        self._ports = ports
        self._names = {"proxy"}
        self._master = master_text(config)  # what the nodes join
        self._nodes: dict[str, str] = {}  # name of the node -> its socket
        self._policy = policy_of(
            config.proxy, (engine.role for engine in config.up.engine), has_pool=_has_pool(config)
        )
        self._looks = config.up.proxy and make_policy(self._policy).uses_tokens
        self._events = list(config.proxy.events)  # as the proxy takes them

    def all(self) -> list[Spec]:
        up = self.config.up
        specs: list[Spec] = []
        if up.master:
            specs.append(self._master_spec())
        specs += self._node_specs()
        engines = [self._engine(index, engine) for index, engine in enumerate(up.engine)]
        specs += engines
        if up.proxy:
            specs.append(self._proxy([engine.role for engine in up.engine], engines))
        return specs

    # ---- the master

    def _master_spec(self) -> Spec:
        config = self.config
        if config.cluster.master:
            raise _wrong(
                "up.master", f"starts a master, and cluster.master names {config.cluster.master}; remove one"
            )
        self._names.add("master")
        listen = self._address("master.listen", config.master.listen)
        http = self._address("master.http", config.master.http)
        self._master = str(Address(advertised_address(listen.host, None), listen.port))
        url = f"{scheme(config)}://{_from_here(http)}"
        env = {**self._env, "MOONPOOL_MASTER_LISTEN": str(listen), "MOONPOOL_MASTER_HTTP": str(http)}

        async def ready() -> bool:
            return await answers_ok(f"{url}/health")

        command = (*MOONPOOL, "master", *self._config_option)
        log = self._log_dir / "master.log"
        return Spec("master", "master", command, env, log, ready, MASTER_STAGE, url, is_base=True)

    # ---- nodes

    def _node_specs(self) -> list[Spec]:
        wanted = self.config.up.node
        if isinstance(wanted, bool):
            self._names.add("node")
            node = self._filled(UpNode(), 0)
            if wanted:
                self._check_memory([node])
            return [self._node("node", node)] if wanted else []
        if len(wanted) > 1 and self.config.node.socket:
            raise _wrong("node.socket", f"names one socket for {len(wanted)} nodes; remove it")
        if len(wanted) > 1 and self.config.node.ssd:
            raise _wrong("node.ssd", f"names directories for {len(wanted)} nodes; write up.node.ssd for each")
        filled = [self._filled(given, index) for index, given in enumerate(wanted)]
        self._check_memory(filled)
        specs = []
        for index, node in enumerate(filled):
            name = f"node-{node.name}"
            self._take_name(name, f"up.node[{index}].name")
            specs.append(self._node(name, node, f"up.node[{index}]."))
        return specs

    def _check_memory(self, nodes: Sequence[UpNode]) -> None:
        """Raises a moonpool Error when the arenas of all nodes together do not fit: each node alone sees only
        what the others have reserved so far.
        """
        from moonpool import _native

        tenants = sum(self.config.node.tenants.values())
        option = "--dram " if len(nodes) == 1 and not tenants else ""
        _native.check_room_for_arenas(sum(node.dram + tenants for node in nodes), option)

    def _filled(self, given: UpNode, index: int) -> UpNode:
        """``given`` with what it leaves open: as [node] says, save what two nodes cannot have both."""
        node = self.config.node
        several = isinstance(self.config.up.node, list)
        return msgspec.structs.replace(
            given,
            name=given.name or (str(index) if several else node.name),
            dram=given.dram or node.dram,
            advertise=given.advertise or ("" if index else node.advertise),
            host_id=given.host_id or node.host_id,
        )

    def _node(self, process: str, node: UpNode, prefix: str = "node.") -> Spec:
        given = self.config.node.socket
        socket_path = self._default_socket() if given else paths.node_socket(node.name)
        first = not self._nodes
        http = self._node_address("http", node.http, first, prefix)
        listen = self._node_address("listen", node.listen, first, prefix)
        url = "" if http is None else f"{scheme(self.config)}://{_from_here(http)}"

        async def ready() -> bool:
            if url and self.config.up.master:
                return await asyncio.to_thread(_has_joined, url)
            if url:
                return await answers_ok(f"{url}/health")
            return await asyncio.to_thread(is_served, socket_path)

        command = [*MOONPOOL, "node", *self._config_option]
        command += ["--name", node.name, "--dram", str(node.dram)]
        command += ["--http", str(http or OFF), "--listen", str(listen or OFF)]
        for option, value in (
            ("--advertise", node.advertise),
            ("--host-id", node.host_id),
            ("--master", self._master),
            ("--socket", given),
        ):
            command += [option, value] if value else []
        for directory in node.ssd:
            command += ["--ssd", directory]
        self._nodes[node.name] = self.sockets[process] = str(socket_path)
        return Spec(
            process,
            "node",
            tuple(command),
            {**self._env, **node.env},
            self._log_dir / f"{process}.log",
            ready,
            NODE_STAGE,
            url,
            is_base=True,
        )

    def _node_address(self, name: str, given: str, first: bool, prefix: str) -> Address | None:
        text: str = given or getattr(self.config.node, name)
        if text == OFF:
            return None
        if given:
            return self._address(prefix + name, given)
        address = parse_address(text, f"node.{name}")
        if not first:
            text = str(Address(address.host, 0))
        return self._address(f"node.{name}", text)

    def _default_socket(self) -> Path:
        node = self.config.node
        return Path(node.socket).absolute() if node.socket else paths.node_socket(node.name)

    # ---- engines

    def _engine(self, index: int, engine: Engine) -> Spec:
        key = f"up.engine[{index}]"
        name = engine.name or f"engine-{index}"
        self._take_name(name, f"{key}.name")
        if not engine.health.startswith("/"):
            raise _wrong(f"{key}.health", "must start with /")
        node = self._node_of(engine, index, key)
        address = self._ports.take(Address(engine.host, engine.port), f"{key}.port", keep=not engine.command)
        env = {**self._env, **engine.env}
        if engine.command:
            if engine.model or engine.args:
                raise _wrong(
                    f"{key}.command", "and model or args exclude each other; write them into the command"
                )
            socket_path = node or str(self._default_socket())
            fill = {"{port}": str(address.port), "{host}": address.host, "{node}": socket_path}
            command = [_with(word, fill) for word in engine.command]
        elif engine.engine == "mock":
            command = self._mock(name, engine, address)
        elif engine.engine == "sglang" and engine.model:
            command = self._sglang(engine, address, node)
        elif engine.model:
            program = find_vllm(engine.executable, path=env.get("PATH"))
            command = self._vllm(name, engine, key, program, address, node)
            env = engine_environment(
                env,
                program=program,
                model=engine.model,
                gpu=has_gpu(env),
                engines=len(self.config.up.engine),
            )
        else:
            raise _wrong(f"{key}", "needs a model or a command")
        self.models[name] = engine.model or ("mock" if engine.engine == "mock" else "")
        url = f"http://{address}"

        async def ready() -> bool:
            return await answers_ok(url + engine.health)

        log = self._log_dir / f"{name}.log"
        return Spec(name, "engine", tuple(command), env, log, ready, ENGINE_STAGE, url)

    def _node_of(self, engine: Engine, index: int, key: str) -> str:
        """The socket of the node that this engine joins; without a node of ours, the host's default one."""
        if engine.node and engine.node not in self._nodes:
            names = ", ".join(self._nodes) or "none"
            raise _wrong(f"{key}.node", f"= {engine.node!r} is no node of this file; its nodes: {names}")
        if engine.node:
            return self._nodes[engine.node]
        sockets = list(self._nodes.values())
        return sockets[index % len(sockets)] if sockets else ""

    def _vllm(
        self, name: str, engine: Engine, key: str, program: str, address: Address, node: str
    ) -> list[str]:
        options = {argument.partition("=")[0].replace("_", "-") for argument in engine.args}
        for option in ("--host", "--port"):
            if option in options:
                raise _wrong(f"{key}.args", f"must not hold {option}; use {key}.{option[2:]}")
        command = [program, "serve", engine.model, "--host", address.host, "--port", str(address.port)]
        command += engine.args
        if engine.kv_pool and KV_TRANSFER_CONFIG not in options:
            pool = Pool(
                role=engine.kv_role,
                load_failure_policy=engine.kv_load_failure_policy,
                node=node,
                require_pool=engine.require_pool,
            )
            command += [KV_TRANSFER_CONFIG, pool.transfer_config()]
        if self._looks and engine.kv_events and not options & OWN_EVENTS:
            stream, replay = _event_sockets(name)
            command += ["--enable-prompt-tokens-details", KV_EVENTS_CONFIG, _events_config(stream, replay)]
            self._events.append(f"{name}={stream},{replay}")
        return command

    def _mock(self, name: str, engine: Engine, address: Address) -> list[str]:
        command = [*MOONPOOL, "mock-engine", "--host", address.host, "--port", str(address.port)]
        command += ["--model", engine.model] if engine.model else []
        if self._looks and engine.kv_events:
            stream, replay = _event_sockets(name)
            command += ["--events", stream, "--replay", replay]
            self._events.append(f"{name}={stream},{replay}")
        return command + engine.args

    def _sglang(self, engine: Engine, address: Address, node: str) -> list[str]:
        """`moonpool sglang` chooses SGLang's flags; what the file's args say goes before them."""
        command = [*MOONPOOL, "sglang", engine.model]
        if engine.kv_pool:
            command += ["--kv-pool", *(["--node", node] if node else [])]
            command += ["--require-pool"] if engine.require_pool else []
        command += [] if engine.role == "both" else ["--pd", engine.role]
        command += ["--python", engine.executable] if engine.executable else []
        return [*command, "--", "--host", address.host, "--port", str(address.port), *engine.args]

    # ---- the proxy

    def _proxy(self, roles: Sequence[str], engines: Sequence[Spec]) -> Spec:
        """In front of the engines that are started here and of those that [proxy] names."""
        key = "proxy.listen"
        address = self._ports.take(parse_address(self.config.proxy.listen, key), key)
        tls = self.config.proxy
        url = f"{'https' if tls.tls_cert else 'http'}://{_from_here(address)}"

        async def ready() -> bool:
            # No page can be asked for without a client's certificate; it listens when it serves.
            return await (accepts(url) if tls.tls_client_ca else answers_ok(f"{url}/health"))

        command = [*MOONPOOL, "proxy", *self._config_option, "--listen", str(address)]
        given = self.config.proxy
        for role, option, urls in (
            ("both", "--engine", given.engines),
            ("prefill", "--prefill", given.prefill),
            ("decode", "--decode", given.decode),
        ):
            ours = [f"{e.name}={e.url}" for e, its in zip(engines, roles, strict=True) if its == role]
            for engine in (*urls, *ours):
                command += [option, engine]
        if self._looks and given.policy == "auto":
            # A proxy that is started again while no node runs would choose another one.
            command += ["--policy", self._policy]
        for option, streams in (("--events", self._events), ("--pool-events", given.pool_events)):
            for stream in streams:
                command += [option, stream]
        log = self._log_dir / "proxy.log"
        return Spec("proxy", "proxy", tuple(command), self._env, log, ready, PROXY_STAGE, url)

    # ---- shared

    def _address(self, key: str, text: str) -> Address:
        """A real address for the setting ``key``; another port where only a default is taken."""
        address = parse_address(text, key)
        require_token(self.config, address, key)
        by_default = self.config.origin(key).kind == "default" and "[" not in key
        return self._ports.take(address, key, or_any=by_default)

    def _take_name(self, name: str, key: str) -> None:
        if name in self._names:
            raise _wrong(key, f"{name} is taken; names of processes must differ")
        self._names.add(name)


def _check_roles(config: Config) -> None:
    """Before engines take a minute to start: the proxy refuses engines of one role alone."""
    proxy, own = config.proxy, [engine.role for engine in config.up.engine]
    roles = {role for role in ("prefill", "decode") if role in own or getattr(proxy, role)}
    if len(roles) == 1 and "both" not in own and not proxy.engines and not proxy.discovery:
        (role,) = roles
        missing = "decode" if role == "prefill" else "prefill"
        raise _wrong(
            "up.engine",
            f"starts engines of the role {role} alone; add a table [[up.engine]] with role = {missing!r}, or "
            f"name such engines in proxy.{missing}",
        )


def _has_pool(config: Config) -> bool:
    """Whether the proxy will find nodes: those that are started here, or those of a master."""
    started = config.up.node and publishes_events(config)
    return config.proxy.pool == "auto" and bool(started or config.cluster.master)


def _event_sockets(process: str) -> tuple[str, str]:
    """Where this process publishes its KV events, and where it tells them again."""
    folder = paths.runtime_dir()
    names = (f"events-{process}.sock", f"events-{process}-replay.sock")
    stream, replay = (f"ipc://{paths.check_socket_path(folder / name)}" for name in names)
    return stream, replay


def _events_config(stream: str, replay: str) -> str:
    """The value of vLLM's --kv-events-config."""
    config = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": stream,
        "replay_endpoint": replay,
        "topic": "kv-events",
    }
    return json.dumps(config, separators=(",", ":"))


def _has_joined(url: str) -> bool:
    """Whether the node serves, and belongs to the master that was started with it."""
    try:
        page = get_json(f"{url}/health", tls=own_child_context())
    except Unavailable:
        return False
    return bool(page["master"] and page["master"]["joined"])


def _from_here(address: Address) -> Address:
    """Where this host reaches what listens on ``address``."""
    return Address("127.0.0.1", address.port) if address.host in ("0.0.0.0", "::") else address


def _with(word: str, fill: Mapping[str, str]) -> str:
    for mark, value in fill.items():
        word = word.replace(mark, value)
    return word


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot make the folder of the logs {folder}: {error.strerror}; choose another with --log-dir",
            operation="up",
            key="up.log_dir",
            cause=error,
        ) from error


def _wrong(key: str, reason: str) -> ConfigError:
    return ConfigError(f"{key} {reason}", operation="up", key=key)
