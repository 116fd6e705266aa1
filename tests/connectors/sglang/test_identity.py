"""What tells two SGLang engines apart, with stand-ins for SGLang's arguments."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moonpool.connectors.objects import Refused
from moonpool.connectors.sglang.identity import identity
from moonpool.core.store.keys import fingerprint
from tests.connectors.sglang.fakes import Engine, MHATokenToKVPoolHost

LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 2048}


def engine(folder: Path | None = None, **changes: Any) -> Engine:
    one = Engine(**({"model_path": str(folder)} if folder else {}))
    for name, value in changes.items():
        setattr(one, name, value)
    return one


def mark(one: Engine) -> bytes:
    return fingerprint(identity(one, one, MHATokenToKVPoolHost()))


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "torch.float16"},
        {"quantization": "fp8"},
        {"torchao_config": "int4wo-128"},
        {"modelopt_quant": "fp8"},
        {"rl_quant_profile": "fp8"},
        {"prefill_kv_cache_dequant_dtype": "bfloat16"},
        {"moe_runner_backend": "flashinfer_mxfp4"},
        {"flashinfer_mxfp4_moe_precision": "bf16"},
        {"lora_target_modules": ["q_proj"]},
        {"enable_tf32_matmul": True},
    ],
)
def test_what_changes_the_numbers_tells_engines_apart(change: dict[str, Any]) -> None:
    assert mark(engine(**change)) != mark(engine())


@pytest.mark.parametrize(
    "change",
    [
        {"moe_runner_backend": "auto", "enable_tf32_matmul": False, "modelopt_quant": None},
        {"chunked_prefill_size": 64, "random_seed": 3, "served_model_name": "other"},
        {"context_len": 4096},
    ],
)
def test_what_does_not_keeps_them_together(change: dict[str, Any]) -> None:
    assert mark(engine(**change)) == mark(engine())


def test_positions_that_depend_on_the_batch_are_refused() -> None:
    """SGLang takes the long factors for a whole batch as soon as one of its sequences is long."""
    config = Engine().hf_config
    config.rope_parameters = LONGROPE
    assert mark(engine(hf_config=config, context_len=2048)) == mark(
        engine(hf_config=config, context_len=1024)
    )
    for length in (2049, None):
        with pytest.raises(Refused, match="no function of the prompt"):
            mark(engine(hf_config=config, context_len=length))


def test_files_beside_the_weights_count(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 100)
    marks = {mark(engine(tmp_path))}
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    marks.add(mark(engine(tmp_path)))
    (tmp_path / "modeling.py").write_text("a = 1")
    assert mark(engine(tmp_path)) in marks  # SGLang does not run it
    marks.add(mark(engine(tmp_path, trust_remote_code=True)))
    assert len(marks) == 3


def test_how_weights_are_quantised_counts_in_every_word() -> None:
    """Names that mean nothing in a config do inside of its quantization_config."""

    def config(dtype: str) -> Any:
        schemes = {"quantization_config": {"weights": {"dtype": dtype}}, "torch_dtype": dtype}
        return SimpleNamespace(**{**vars(Engine().hf_config), "to_dict": lambda: schemes})

    assert mark(engine(hf_config=config("int4"))) != mark(engine(hf_config=config("int8")))
