"""`moonpool up`: a node, engines and the proxy of one host, from one configuration.

plan() makes of a Config what is to run: addresses with real ports, commands, environments, logs. run() gives
that to the supervisor and keeps RUNTIME/up.json, which tells other programs (`moonpool status`, tests, demos)
what runs where.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from moonpool.core import paths
from moonpool.core.addresses import Address, parse_address
from moonpool.core.config import Config, Engine
from moonpool.core.errors import ConfigError
from moonpool.core.http_get import answers_ok
from moonpool.core.node_socket import is_served
from moonpool.core.supervisor import Event, Limits, Spec, Supervisor
from moonpool.core.vllm_command import KV_TRANSFER_CONFIG, Pool, engine_environment, find_vllm, has_gpu

NODE_STAGE, ENGINE_STAGE, PROXY_STAGE = 0, 1, 2
MOONPOOL = (
    sys.executable,
    "-P",
    "-m",
    "moonpool",
)  # -P: a folder of that name in the working folder is not ours


class ProcessState(msgspec.Struct, frozen=True, omit_defaults=True):
    """One process in up.json. url: "" when it has none; restarts: starts after the first."""

    name: str
    kind: str
    state: str
    pid: int | None
    url: str
    log: str
    restarts: int
    model: str = ""
    socket: str = ""


class UpState(msgspec.Struct, frozen=True):
    """The file RUNTIME/up.json. pid: what to send SIGTERM to. ready: everything was up at least once."""

    pid: int
    ready: bool
    started_at: float
    runtime_dir: str
    log_dir: str
    node: ProcessState | None
    engines: list[ProcessState]
    proxy: ProcessState | None


@dataclass(frozen=True)
class Plan:
    """What is to run; ``models`` and ``sockets`` by the name of the process."""

    specs: tuple[Spec, ...]
    log_dir: Path
    limits: Limits
    models: Mapping[str, str] = field(default_factory=dict)
    sockets: Mapping[str, str] = field(default_factory=dict)


def plan(config: Config, *, config_file: str = "", env: Mapping[str, str] | None = None) -> Plan:
    """Decides addresses and commands. Takes free ports where 0 is asked for. Raises ConfigError for what
    cannot run.
    """
    env = dict(os.environ if env is None else env)
    up = config.up
    if not up.engine and not config.proxy.engines and up.proxy:
        raise ConfigError(
            "there is no engine to start: add a table [[up.engine]] to the config file, or give --model",
            operation="up",
            key="up.engine",
        )
    if config.cluster.token_file:
        env[paths.TOKEN_FILE_VARIABLE] = str(Path(config.cluster.token_file).absolute())
        env.pop(paths.TOKEN_VARIABLE, None)
    runtime = paths.runtime_dir(ensure=True)
    log_dir = Path(up.log_dir).absolute() if up.log_dir else runtime / "logs"
    _make_folder(log_dir)
    specs: list[Spec] = []
    models: dict[str, str] = {}
    sockets: dict[str, str] = {}
    with ExitStack() as held:
        if up.node:
            node = _node(config, config_file, env, log_dir, held)
            specs.append(node)
            sockets[node.name] = str(_node_socket(config))
        urls = list(config.proxy.engines)
        names: set[str] = {"node", "proxy"}
        for index, engine in enumerate(up.engine):
            name = engine.name or f"engine-{index}"
            if name in names:
                raise _wrong(f"up.engine[{index}].name", f"{name} is taken; names of processes must differ")
            names.add(name)
            spec = _engine(config, engine, index, name, env, log_dir, held)
            specs.append(spec)
            models[name] = engine.model
            urls.append(f"{name}={spec.url}")
        if up.proxy:
            specs.append(_proxy(config, config_file, urls, env, log_dir, held))
    limits = Limits(
        ready_timeout_s=up.ready_timeout_s,
        start_attempts_max=up.start_attempts_max,
        grace_s=up.grace_s,
        backoff_initial_s=up.backoff_initial_s,
        backoff_max_s=max(up.backoff_initial_s, up.backoff_max_s),
        backoff_reset_s=up.backoff_reset_s,
        progress_interval_s=up.progress_interval_s,
    )
    return Plan(tuple(specs), log_dir, limits, models, sockets)


def run(plan: Plan, tell: Callable[[Event], None], *, pid: int | None = None) -> None:
    """Runs the plan until SIGTERM or SIGINT; a second one kills at once. Raises a moonpool Error when it
    cannot start.

    pid: whom to signal in order to end all of it (default: this process).
    """
    with _only_one():
        for spec in plan.specs:
            with suppress(FileNotFoundError):
                spec.log.replace(spec.log.with_name(spec.log.name + ".old"))
        asyncio.run(_run(plan, tell, os.getpid() if pid is None else pid))


async def _run(plan: Plan, tell: Callable[[Event], None], pid: int) -> None:
    stop, hurry = asyncio.Event(), asyncio.Event()
    state_file = paths.runtime_dir() / "up.json"
    started_at = time.time()
    was_ready = False

    def asked() -> None:
        (hurry if stop.is_set() else stop).set()
        tell(Event("", "killing everything" if hurry.is_set() else "stopping; once more kills at once"))

    def write_state() -> None:
        nonlocal was_ready
        was_ready = was_ready or all(kept.first_ready.is_set() for kept in supervisor.kept)
        _write_state(state_file, _state(supervisor, plan, pid, started_at, was_ready))

    for signal_number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(signal_number) is not signal.SIG_IGN:  # as nohup asks
            asyncio.get_running_loop().add_signal_handler(signal_number, asked)
    supervisor = Supervisor(plan.specs, plan.limits, tell, write_state, tag=f"up-{os.getpid()}")
    try:
        await supervisor.run(stop, hurry)
    finally:
        state_file.unlink(missing_ok=True)


def _state(supervisor: Supervisor, plan: Plan, pid: int, started_at: float, ready: bool) -> UpState:
    rows = [
        ProcessState(
            name=kept.spec.name,
            kind=kept.spec.kind,
            state=kept.state.value,
            pid=kept.pid,
            url=kept.spec.url,
            log=str(kept.spec.log),
            restarts=max(0, kept.starts - 1),
            model=plan.models.get(kept.spec.name, ""),
            socket=plan.sockets.get(kept.spec.name, ""),
        )
        for kept in supervisor.kept
    ]
    by_kind = {row.kind: row for row in rows}
    return UpState(
        pid=pid,
        ready=ready,
        started_at=started_at,
        runtime_dir=str(paths.runtime_dir()),
        log_dir=str(plan.log_dir),
        node=by_kind.get("node"),
        engines=[row for row in rows if row.kind == "engine"],
        proxy=by_kind.get("proxy"),
    )


def read_state() -> UpState | None:
    """What `moonpool up` of this runtime folder says of itself; None when none runs."""
    try:
        text = (paths.runtime_dir() / "up.json").read_bytes()
        return msgspec.json.decode(text, type=UpState)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def _write_state(path: Path, state: UpState) -> None:
    draft = path.with_name(f".{path.name}-{os.getpid()}")
    draft.write_bytes(msgspec.json.format(msgspec.json.encode(state), indent=2) + b"\n")
    draft.replace(path)


def _node(config: Config, config_file: str, env: Mapping[str, str], log_dir: Path, held: ExitStack) -> Spec:
    node = config.node
    socket_path = _node_socket(config)
    http = "off"
    if node.http != "off":
        http = str(_free_address(parse_address(node.http, "node.http"), "node.http", held))
    url = "" if http == "off" else f"http://{http}"

    async def ready() -> bool:
        if url:
            return await answers_ok(f"{url}/health")
        return await asyncio.to_thread(is_served, socket_path)

    command = [*MOONPOOL, "node", *_config_option(config_file)]
    command += ["--name", node.name, "--dram", str(node.dram), "--http", http]
    if node.socket:
        command += ["--socket", node.socket]
    return Spec("node", "node", tuple(command), env, log_dir / "node.log", ready, NODE_STAGE, url)


def _engine(
    config: Config,
    engine: Engine,
    index: int,
    name: str,
    env: Mapping[str, str],
    log_dir: Path,
    held: ExitStack,
) -> Spec:
    key = f"up.engine[{index}]"
    if not engine.health.startswith("/"):
        raise _wrong(f"{key}.health", "must start with /")
    address = _free_address(Address(engine.host, engine.port), f"{key}.port", held)
    env = {**env, **engine.env}
    if engine.command:
        if engine.model or engine.args:
            raise _wrong(
                f"{key}.command", "and model or args exclude each other; write them into the command"
            )
        fill = {"{port}": str(address.port), "{host}": address.host, "{node}": str(_node_socket(config))}
        command = [_filled(word, fill) for word in engine.command]
    elif engine.model:
        program = find_vllm(engine.executable, path=env.get("PATH"))
        command = _vllm_command(config, engine, key, program, address)
        env = engine_environment(
            env, program=program, model=engine.model, gpu=has_gpu(env), engines=len(config.up.engine)
        )
    else:
        raise _wrong(f"{key}", "needs a model or a command")
    url = f"http://{address}"

    async def ready() -> bool:
        return await answers_ok(url + engine.health)

    return Spec(name, "engine", tuple(command), env, log_dir / f"{name}.log", ready, ENGINE_STAGE, url)


def _vllm_command(config: Config, engine: Engine, key: str, program: str, address: Address) -> list[str]:
    options = {argument.partition("=")[0].replace("_", "-") for argument in engine.args}
    for option in ("--host", "--port"):
        if option in options:
            raise _wrong(f"{key}.args", f"must not hold {option}; use {key}.{option[2:]}")
    command = [
        program,
        "serve",
        engine.model,
        "--host",
        address.host,
        "--port",
        str(address.port),
        *engine.args,
    ]
    if engine.kv_pool and KV_TRANSFER_CONFIG not in options:
        pool = Pool(
            role=engine.kv_role,
            load_failure_policy=engine.kv_load_failure_policy,
            node=str(_node_socket(config)) if config.up.node else "",
            require_pool=engine.require_pool,
        )
        command += [KV_TRANSFER_CONFIG, pool.transfer_config()]
    return command


def _proxy(
    config: Config, config_file: str, urls: list[str], env: Mapping[str, str], log_dir: Path, held: ExitStack
) -> Spec:
    address = _free_address(parse_address(config.proxy.listen, "proxy.listen"), "proxy.listen", held)
    reach = Address("127.0.0.1", address.port) if address.host in ("0.0.0.0", "::") else address
    url = f"http://{reach}"

    async def ready() -> bool:
        return await answers_ok(f"{url}/health")

    command = [*MOONPOOL, "proxy", *_config_option(config_file), "--listen", str(address)]
    for engine_url in urls:
        command += ["--engine", engine_url]
    return Spec("proxy", "proxy", tuple(command), env, log_dir / "proxy.log", ready, PROXY_STAGE, url)


def _node_socket(config: Config) -> Path:
    return Path(config.node.socket).absolute() if config.node.socket else paths.node_socket(config.node.name)


def _config_option(config_file: str) -> list[str]:
    return ["--config", str(Path(config_file).absolute())] if config_file else []


def _free_address(address: Address, key: str, held: ExitStack) -> Address:
    """``address`` with a real port. It is held until ``held`` closes, so that no two of ours get the same.

    Raises ConfigError when somebody else listens there: else we would take that one for ours when it answers.
    """
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    probe = held.enter_context(socket.socket(family, socket.SOCK_STREAM))
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        probe.bind(address)
        probe.listen(1)
    except OSError as error:
        raise ConfigError(
            f"{key}: address {address} cannot be used: {error.strerror}; choose another, or port 0 for any",
            operation="up",
            key=key,
            peer=str(address),
            cause=error,
        ) from error
    return Address(address.host, probe.getsockname()[1])


def _filled(word: str, fill: Mapping[str, str]) -> str:
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


@contextmanager
def _only_one() -> Iterator[None]:
    """Held by the one `moonpool up` of a runtime folder; the kernel frees it with the process."""
    path = paths.runtime_dir(ensure=True) / "up.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another moonpool up runs with the runtime folder {path.parent}; end it, or set "
                f"{paths.RUNTIME_DIR_VARIABLE} to another folder",
                operation="up",
                key=paths.RUNTIME_DIR_VARIABLE,
                peer=str(path),
            ) from None
        yield
    finally:
        os.close(descriptor)


def _wrong(key: str, reason: str) -> ConfigError:
    return ConfigError(f"{key} {reason}", operation="up", key=key)
