"""The fingerprint of an SGLang engine's KV."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from moonpool.connectors import positions
from moonpool.connectors.identity import (
    code_digest,
    identity_of,
    is_dummy,
    plain,
    quantisation_files,
    stored_dtype,
    weights_revision,
)
from moonpool.connectors.objects import Refused
from moonpool.connectors.sglang import compat
from moonpool.connectors.weights import weights_digest
from moonpool.core.errors import ConfigError
from moonpool.core.store.keys import Json, digest_of

# Load formats whose weights are the files at the model's path, and nothing else.
LOAD_FORMATS = frozenset(
    (
        *("auto", "pt", "safetensors", "fastsafetensors", "instanttensor", "npcache", "dummy", "layered"),
        *("sharded_state", "presharded", "gguf", "expert_pack", "bitsandbytes", "mistral", "runai_streamer"),
    )
)
# Arguments that change what is computed, or the type of a number on the way, and stand nowhere else in the
# fingerprint; docs/keys.md says why the others do not count.
COUNTED = (
    *("model_config_parser", "rl_quant_profile", "modelopt_quant", "quantize_and_serve"),
    *("modelopt_checkpoint_restore_path", "qsa_indexer_dtype", "prefill_kv_cache_dequant_dtype"),
    *("enable_tf32_matmul", "rl_on_policy_target", "moe_runner_backend", "fp8_gemm_runner_backend"),
    *("fp4_gemm_runner_backend", "flashinfer_mxfp4_moe_precision", "enable_w4a4_mxfp4_megamoe"),
    *("deepep_dispatcher_output_dtype", "flashinfer_a2a_dispatch_type", "enable_quant_communications"),
    *("enable_deepseek_v4_fp4_indexer", "enable_encoder_swa_bounded_replay"),
    *("enable_decoder_swa_bounded_replay", "kt_weight_path", "kt_method", "dllm_algorithm"),
    *("dllm_algorithm_config", "lora_target_modules", "experts_shared_outer_loras"),
)
_NOTHING = (None, False, "", "auto", "none")


def identity(args: Any, model: Any, pool: Any) -> dict[str, Json]:
    """The fields of the fingerprint.

    args: SGLang's ServerArgs.
    model: its ModelConfig.
    pool: the host pool.

    Raises ConfigError or Refused when the weights that the engine serves cannot be identified, and Refused
    when its KV is no function of the tokens.
    """
    length = getattr(model, "context_len", None)
    _check_positions(getattr(model, "hf_text_config", model.hf_config), length)
    form = ["sglang", "mla" if type(pool).__name__.startswith("MLA") else "k,v"]
    if tag := getattr(pool, "storage_format_tag", None):
        form.append(str(tag))
    if getattr(pool, "target_layer_num", pool.layer_num) != pool.layer_num:  # the last are a draft model's
        form.append(f"draft {draft_revision(args)}")
    kv_dtype = stored_dtype(getattr(args, "kv_cache_dtype", None), pool.dtype)
    if scales := getattr(args, "quantization_param_path", None):
        kv_dtype += f" scales {hashlib.sha256(Path(scales).read_bytes()).hexdigest()}"
    quantisation = getattr(model, "quantization", None)
    if torchao := getattr(args, "torchao_config", None):
        quantisation = f"{quantisation} torchao {torchao}"
    weights = revision(args, model)
    if serves_lora(args) and (adapters := adapter_digests(args)):
        weights += f" adapters {digest_of(adapters)}"
    return identity_of(
        model,
        quantisation=quantisation_files(args.model_path, quantisation),
        revision=weights,
        kv_dtype=kv_dtype,
        block_tokens=int(pool.page_size),
        form=" ".join(form),
        length=length,
        arguments=arguments(args),
    )


def _check_positions(text: Any, length: int | None) -> None:
    """Raises Refused for a model whose KV depends on the other requests of a batch: SGLang takes the long
    factors for all of them as soon as one has a position beyond the original length."""
    config = {name: getattr(text, name, None) for name in positions.FIELDS}
    if positions.varying_kind(config) != "longrope":
        return
    if positions.length_factors(config, length) != ["longrope: short factors"]:
        raise Refused(
            "SGLang chooses the factors of longrope positions by the longest sequence of a batch, so this "
            "model's KV is no function of the prompt; with --context-length up to the model's original "
            "length it is"
        )


def arguments(args: Any, more: Iterable[str] = ()) -> dict[str, Json]:
    """Those of ``COUNTED`` and ``more`` that this server was given, and the code beside its weights."""
    found = {name: plain(getattr(args, name, None)) for name in (*COUNTED, *more)}
    counted: dict[str, Json] = {name: value for name, value in found.items() if value not in _NOTHING}
    if getattr(args, "trust_remote_code", False) and (code := code_digest(args.model_path)):
        counted["code"] = code
    return counted


def serves_lora(args: Any) -> bool:
    """Whether requests may name an adapter: --enable-lora, which --lora-paths stands for too."""
    enabled = getattr(args, "enable_lora", None)
    return bool(getattr(args, "lora_paths", None)) if enabled is None else bool(enabled)


def adapter_digests(args: Any) -> dict[str, Json]:
    """What lies at the paths of the adapters that are given at start, by name: SGLang's page keys tell these
    by name and path only. (Those that are loaded later have a random name.) Raises ConfigError, OSError."""
    digests: dict[str, Json] = {}
    for name, path in _adapters(getattr(args, "lora_paths", None) or ()):
        try:
            folder = Path(path) if Path(path).exists() else Path(compat.hub_folder(path))
        except Exception as error:  # the hub's client may raise anything
            raise ConfigError(
                f"cannot tell which weights the adapter {path!r} stands for ({error}); download it and give "
                f"the path",
                operation="fingerprint",
                key="lora_paths",
            ) from error
        settings = folder / "adapter_config.json"
        scaling = hashlib.sha256(settings.read_bytes() if settings.exists() else b"").hexdigest()
        digests[f"{name}={path}"] = [weights_digest(folder), scaling]
    return digests


def _adapters(given: Any) -> Iterator[tuple[str, str]]:
    """(name, path) of each, in any form that ServerArgs has them before and after it is resolved."""
    if isinstance(given, Mapping):
        given = [f"{name}={path}" if isinstance(path, str) else path for name, path in given.items()]
    for each in given:
        if isinstance(each, str):
            name, _, path = each.partition("=")
            yield name, path or name
        elif isinstance(each, Mapping):
            yield each["lora_name"], each["lora_path"]
        else:
            yield each.lora_name, each.lora_path


def revision(args: Any, model: Any) -> str:
    """Which weights: the hub commit, or a digest over the files of a local path. Raises ConfigError, and
    Refused for weights that come from elsewhere."""
    load_format = str(getattr(args, "load_format", "auto")).rpartition(".")[2].lower()
    if load_format not in LOAD_FORMATS:
        raise Refused(
            f"--load-format {load_format} takes weights from elsewhere than the model's path, so it cannot "
            f"be told which they are"
        )
    if is_dummy(load_format):
        return _dummy(args)
    return weights_revision(args.model_path, args.model_path, model.hf_config)


def draft_revision(args: Any) -> str:
    """Which weights the draft model has, and how it is used. Without a path of their own they are among the
    target's (multi-token prediction). Raises ConfigError."""
    path = args.speculative_draft_model_path or args.model_path
    if is_dummy(args.speculative_draft_load_format or getattr(args, "load_format", "auto")):
        weights = _dummy(args)
    else:
        hf_config = None if Path(path).exists() else compat.draft_model_config(args).hf_config
        weights = weights_revision(path, path, hf_config)
    return f"{args.speculative_algorithm} {weights}"


def _dummy(args: Any) -> str:
    return f"dummy tp={args.tp_size} pp={args.pp_size}"
