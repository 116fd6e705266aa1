"""A real model of 10 MB: a Llama with random weights and a tokenizer whose tokens are bytes.

It answers nonsense, but it is a language model in every respect that matters to a KV cache: real attention
over real keys and values, so one wrong byte in a loaded block changes what it says. The same seed gives the
same files everywhere. Written with numpy alone, so that making it takes a second; any engine that reads the
Hugging Face layout takes it.

    python examples/demo/tiny_model.py FOLDER [SEED]
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np

SEED = 0
LAYERS = 4
HIDDEN = 256
INNER = 512
HEADS = 4
KV_HEADS = 2
HEAD_SIZE = 64
CONTEXT = 8192
SPREAD = 0.08  # standard deviation of the weights; wide enough that every prompt gets an answer of its own
SPECIAL = ("<s>", "</s>", "<pad>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ message['role'] }}: {{ message['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def byte_symbols() -> list[str]:
    """One printable character for each byte, as byte-level tokenizers write them: itself, or one above
    U+00FF.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    stand_ins = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(stand_ins)) for byte in range(256)]


def tokenizer() -> dict[str, object]:
    """tokenizer.json: token id = byte value; then the special tokens."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": 256 + i, "content": text, **special} for i, text in enumerate(SPECIAL)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {symbol: byte for byte, symbol in enumerate(byte_symbols())},
            "merges": [],
        },
    }


def tokenizer_config() -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[0],
        "eos_token": SPECIAL[1],
        "pad_token": SPECIAL[2],
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def config() -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_SIZE,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": 256 + len(SPECIAL),
        "bos_token_id": 256,
        "eos_token_id": 257,
        "pad_token_id": 258,
        "torch_dtype": "float32",
    }


def weights(seed: int) -> dict[str, np.ndarray]:
    """Name -> float32 array; projections are (out, in)."""
    random = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (random.standard_normal((rows, columns)) * SPREAD).astype(np.float32)

    vocabulary = 256 + len(SPECIAL)
    tensors = {"model.embed_tokens.weight": matrix(vocabulary, HIDDEN)}
    for layer in range(LAYERS):
        name = f"model.layers.{layer}."
        tensors[name + "self_attn.q_proj.weight"] = matrix(HEADS * HEAD_SIZE, HIDDEN)
        tensors[name + "self_attn.k_proj.weight"] = matrix(KV_HEADS * HEAD_SIZE, HIDDEN)
        tensors[name + "self_attn.v_proj.weight"] = matrix(KV_HEADS * HEAD_SIZE, HIDDEN)
        tensors[name + "self_attn.o_proj.weight"] = matrix(HIDDEN, HEADS * HEAD_SIZE)
        tensors[name + "mlp.gate_proj.weight"] = matrix(INNER, HIDDEN)
        tensors[name + "mlp.up_proj.weight"] = matrix(INNER, HIDDEN)
        tensors[name + "mlp.down_proj.weight"] = matrix(HIDDEN, INNER)
        tensors[name + "input_layernorm.weight"] = np.ones(HIDDEN, np.float32)
        tensors[name + "post_attention_layernorm.weight"] = np.ones(HIDDEN, np.float32)
    tensors["model.norm.weight"] = np.ones(HIDDEN, np.float32)
    tensors["lm_head.weight"] = matrix(vocabulary, HIDDEN)
    return tensors


def safetensors(tensors: dict[str, np.ndarray]) -> bytes:
    """The safetensors format: u64 length of the header | header as JSON | the arrays one after the other."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, array in tensors.items():
        header[name] = {
            "dtype": "F32",
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(array.tobytes() for array in tensors.values())


def make(folder: Path, seed: int = SEED) -> Path:
    """Makes the model in ``folder`` unless one is there; a half-made one is never visible. Another seed gives
    other weights.
    """
    if (folder / "config.json").exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=".tiny-", dir=folder.parent))
    try:
        draft.chmod(0o755)
        (draft / "model.safetensors").write_bytes(safetensors(weights(seed)))
        for name, content in (
            ("config.json", config()),
            ("tokenizer.json", tokenizer()),
            ("tokenizer_config.json", tokenizer_config()),
            ("generation_config.json", {"bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258}),
        ):
            (draft / name).write_text(json.dumps(content, indent=1, ensure_ascii=False))
        os.rename(draft, folder)
    except OSError:
        shutil.rmtree(draft, ignore_errors=True)
        if not (folder / "config.json").exists():  # otherwise another process was faster
            raise
    return folder


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    print(make(Path(sys.argv[1]), *map(int, sys.argv[2:])))
