"""Real vLLM engines, many and short: each is a fork of this process, which has imported vLLM already.

Run by tests with the interpreter that has vLLM: ``identity_bed.py ANSWER_FD {}``; JSON commands in, JSON
answers out, as engine_driver.py has them.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import torch
import transformers
import vllm
from vllm import LLM, EngineArgs, SamplingParams
from vllm.model_executor.models import registry

sys.path.append(str(Path(__file__).resolve().parents[3]))
from moonpool.connectors.vllm import plugin
from tests.connectors.vllm import media_models
from tests.connectors.vllm.node_objects import arena

plugin.register()
# vLLM looks at each kind of model in a process of its own, to keep its own process clean; a fork is one.
registry._run_in_subprocess = lambda look: look()

DEFAULTS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 2048,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 2048,
    "block_size": 32,
    "enforce_eager": True,
    "seed": 0,
    "skip_tokenizer_init": True,
    "kv_cache_memory_bytes": 32 << 20,
    "disable_log_stats": False,
}
ATTENTION = 3.0
DRAIN_S = 30.0
JOIN_S = 30.0
COUNTS = {
    "loaded_bytes": "moonpool_connector_loaded_bytes_total",
    "survived_errors": "moonpool_connector_survived_errors_total",
    "preemptions": "vllm:num_preemptions_total",
}
ENCODER_COUNTS = ("lookups", "hits", "encoded", "loads", "loaded_bytes", "load_errors", "saves", "existing")


def make_model(path: str, kind: str, config: dict[str, Any], seed: int = 0) -> None:
    """A model of random weights, wide enough that every prompt gets an answer of its own; in its attention
    above all, so that it depends on where each token stands."""
    if Path(path, "config.json").exists():
        return
    torch.manual_seed(seed)
    made = transformers.AutoConfig.for_model(kind, **config)
    model = transformers.AutoModelForCausalLM.from_config(made, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ("attn" in name or "attention" in name) and weight.dim() == 2:
                weight *= ATTENTION
    model.save_pretrained(path)


def configured(args: dict[str, Any], environment: dict[str, str]) -> dict[str, Any]:
    """What the connector makes of an engine's arguments, without the engine: "mark" stands for the
    fingerprint, but for the form of the bytes."""
    from moonpool.connectors.vllm import engine_config, identity
    from moonpool.core.store import keys

    os.environ.update(environment)
    given = {key: value for key, value in (DEFAULTS | args).items() if key != "disable_log_stats"}
    config = EngineArgs(**given).create_engine_config()
    refusal = engine_config.context_refusal(config) or engine_config.weights_refusal(config)
    fields = identity.identity(
        config,
        block_tokens=config.cache_config.block_size,
        kv_dtype=identity.kv_dtype(config, config.model_config.dtype),
        form="",
    )
    mark = keys.fingerprint(fields)
    return {"mark": mark.hex(), "refusal": refusal}


def fields(args: dict[str, Any]) -> dict[str, Any]:
    """The sections of vLLM's configuration and, of those that the connector looks at, the fields."""
    from moonpool.connectors.vllm import identity_arguments as arguments

    given = {key: value for key, value in (DEFAULTS | args).items() if key != "disable_log_stats"}
    config = EngineArgs(**given, enable_lora=True).create_engine_config()
    sections = list(arguments.fields_of(config))
    return {
        "sections": sections,
        "fields": {name: sorted(arguments.fields_of(getattr(config, name))) for name in arguments.LEFT_OUT},
        "arguments": arguments.arguments(config),
        "version": vllm.__version__,
    }


def media_fields() -> list[str]:
    """The options of vLLM for images, sounds and videos."""
    from vllm.config.multimodal import MultiModalConfig

    from moonpool.connectors.vllm import identity_arguments as arguments

    return sorted(arguments.fields_of(MultiModalConfig()))


def run(
    args: dict[str, Any],
    environment: dict[str, str],
    prompts: list[Any],
    max_tokens: int,
    together: bool = False,
    fault: str = "",
    node_pid: int = 0,
) -> dict[str, Any]:
    """Starts an engine and lets it answer the prompts, one after the other or all ``together``. prompts: what
    media_models.request takes. fault: what happens before each load of an encoder output, see encoder_faults.
    node_pid: the node that is killed then. "mark": its fingerprint; "left": what it still holds in the end;
    and COUNTS."""
    os.environ.update(environment)
    media_models.prepare(args["model"])
    if fault:
        encoder_faults(fault, node_pid)
    llm = LLM(**DEFAULTS | args)
    engine, core = llm.llm_engine, llm.llm_engine.engine_core.engine_core
    connector, encoder = core.scheduler.connector, core.scheduler.ec_connector
    runs = encoder_runs(core)
    if encoder is not None:
        _until(lambda: encoder._sched.membership.pool() is not None, JOIN_S)
    mark, refusal = "", ""
    if connector is not None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        hand = get_kv_transfer_group().get_handshake_metadata()
        mark, refusal = hand.fingerprint.hex(), hand.refusal
        if not refusal and prompts:
            _until(lambda: connector._sched.pool() is not None, JOIN_S)
    outputs: dict[str, Any] = {}
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=1)
    for number, prompt in enumerate(prompts):
        runs.append(0)
        engine.add_request(str(number), media_models.request(prompt), sampling)
        while engine.has_unfinished_requests() and (not together or number == len(prompts) - 1):
            for output in engine.step():
                if output.finished:
                    (answer,) = output.outputs
                    chances = [
                        step[token].logprob
                        for token, step in zip(answer.token_ids, answer.logprobs, strict=True)
                    ]
                    taken = (output.kv_transfer_params or {}).get("moonpool") or {}
                    outputs[output.request_id] = {
                        "tokens": list(answer.token_ids),
                        "chances": chances,
                        "pool": taken.get("pool_tokens", 0),
                        "local": taken.get("local_tokens", 0),
                        "errors": taken.get("load_errors", 0),
                        "length": len(output.prompt_token_ids),
                        "encoder_runs": runs[-1] if runs else 0,
                    }
    deadline_s = time.monotonic() + DRAIN_S
    while core.scheduler.has_requests() and time.monotonic() < deadline_s:
        engine.step()
        core.step()
        time.sleep(0.001)
    pool = core.scheduler.kv_cache_manager.block_pool
    left = {
        "blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
        "pins": connector._sched.lookups.pins if connector is not None else 0,
    }
    counts: dict[str, Any] = {name: _counted(metric) for name, metric in COUNTS.items()}
    counts["encoder"] = {name: _counted(f"moonpool_encoder_{name}_total") for name in ENCODER_COUNTS}
    counts["survived_errors"] += _counted("moonpool_encoder_survived_errors_total")
    core.shutdown()
    answers = [outputs[str(number)] for number in range(len(prompts))]
    return {"mark": mark, "refusal": refusal, "outputs": answers, "left": left, **counts}


def encoder_runs(core: Any) -> list[int]:
    """From now on the items that the encoder computes are added to the last number of this list."""
    model = core.model_executor.driver_worker.model_runner.model
    original, runs = getattr(model, "embed_multimodal", None), list[int]()
    if original is None:
        return runs

    def counted(**kwargs: Any) -> Any:
        outputs = original(**kwargs)
        runs[-1] += len(outputs)
        return outputs

    model.embed_multimodal = counted
    return runs


def encoder_faults(fault: str, node_pid: int) -> None:
    """From now on something happens to each encoder output between its lookup and its load: it is "gone", or
    "shorter", or has a "flipped" bit or the content of an "other" one, or its node is "killed"."""
    from moonpool.connectors.vllm.encoder.objects import HEADER_BYTES, MAGIC
    from moonpool.connectors.vllm.pool import Pool

    original = Pool.submit_view

    def faulty(pool: Any, name: bytes) -> Any:
        client = pool.client
        if fault == "gone":
            client.remove([name])
        elif fault == "shorter":
            client.put([name], [b"another"], replace=True)
        elif fault == "other":
            other = next(row[0] for row in client.list(b"", 100) if row[0] != name)
            (content,) = client.get_views([other])
            client.put([name], [bytes(content)], replace=True)
        elif fault == "flipped":
            with arena(node_pid) as memory:
                memory[memory.find(MAGIC + name) + HEADER_BYTES + 3] ^= 0x40
        elif fault == "killed":
            os.kill(node_pid, signal.SIGKILL)
        return original(pool, name)

    Pool.submit_view = faulty  # type: ignore[method-assign]


def _counted(name: str) -> float:
    from prometheus_client import REGISTRY

    return sum(
        sample.value for family in REGISTRY.collect() for sample in family.samples if sample.name == name
    )


def _until(true: Callable[[], bool], timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline_s, "the engine did not join the pool"
        time.sleep(0.01)


def version() -> str:
    return vllm.__version__


OPERATIONS: dict[str, Callable[..., Any]] = {
    "make_model": make_model,
    "make_media_model": media_models.make,
    "configured": configured,
    "fields": fields,
    "media_fields": media_fields,
    "run": run,
    "version": version,
}


def in_a_fork(operation: str, args: dict[str, Any]) -> dict[str, Any]:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            answer = {"result": OPERATIONS[operation](**args)}
        except BaseException as error:
            traceback.print_exc()
            answer = {"error": [f"{type(error).__name__}: {error}"]}
        with os.fdopen(writer, "w") as pipe:
            json.dump(answer, pipe)
        sys.stdout.flush()
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    answered: dict[str, Any] = json.loads(text) if text else {"error": [f"the fork ended ({status})"]}
    return answered


def main() -> None:
    with os.fdopen(int(sys.argv[1]), "w", buffering=1) as answers:
        print(json.dumps({"result": "ready"}), file=answers)
        for line in sys.stdin:
            command = json.loads(line)
            if command["op"] == "exit":
                break
            print(json.dumps(in_a_fork(command["op"], command["args"])), file=answers)


if __name__ == "__main__":
    main()
