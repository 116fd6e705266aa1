"""The model that the demo serves, how its engines are started for it, and what one token of its KV cache
weighs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import tiny_model

BLOCK_TOKENS = 32
KV_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Model:
    """source: folder or hub name. dtype: of weights and KV cache. token_bytes: KV bytes of one token; None:
    unknown.
    """

    source: str
    dtype: str
    token_bytes: int | None
    is_local: bool

    @property
    def served_name(self) -> str:
        return Path(self.source).name if self.is_local else self.source

    def arguments(self, cpu: bool) -> list[str]:
        """For `vllm serve MODEL`."""
        memory = str(256 << 20 if self.token_bytes and self.token_bytes <= 8192 else 2 << 30)
        return [
            *("--served-model-name", self.served_name),
            *("--dtype", self.dtype),
            *("--max-model-len", "4096"),
            *("--max-num-seqs", "8"),
            *("--max-num-batched-tokens", "4096"),
            *("--block-size", str(BLOCK_TOKENS)),
            *(("--kv-cache-memory-bytes", memory) if cpu else ("--gpu-memory-utilization", "0.4")),
            "--enforce-eager",
            *("--seed", "0"),
        ]

    def environment(self, cpu: bool) -> dict[str, str]:
        """Beyond what `moonpool up` sets by itself: without it, a CPU engine compiles kernels for a minute
        first.
        """
        return {"VLLM_CPU_CI_ENV": "1"} if cpu else {}


def tiny(cache: Path) -> Model:
    folder = tiny_model.make(cache / "models" / "tiny")
    return Model(str(folder), "float32", token_bytes(folder, "float32"), is_local=True)


def given(source: str) -> Model:
    """A model of the user's own; bfloat16, unless its config says otherwise."""
    folder = Path(source)
    if not folder.exists():
        return Model(source, "auto", None, is_local=False)
    if not (folder / "config.json").exists():
        raise ValueError(f"MODEL={source} is a folder without config.json")
    config = json.loads((folder / "config.json").read_text())
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    return Model(str(folder.resolve()), dtype, token_bytes(folder, dtype), is_local=True)


def token_bytes(folder: Path, dtype: str) -> int | None:
    """K and V of every layer and KV head; None for a model whose cache has another form (MLA, sliding
    windows).
    """
    config = json.loads((folder / "config.json").read_text())
    plain = ("num_hidden_layers", "num_attention_heads", "hidden_size")
    if (
        any(name not in config for name in plain)
        or config.get("kv_lora_rank")
        or config.get("sliding_window")
    ):
        return None
    if dtype not in KV_BYTES:
        return None
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(config["num_hidden_layers"] * 2 * heads * size * KV_BYTES[dtype])
