"""A real, tiny Llama with random weights and a byte-level tokenizer, 10 MB: ``tiny_model.py FOLDER SEED
...``.

Equal seeds make equal files; different seeds make equal configs with different weights.
"""

from __future__ import annotations

import sys

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, ids 0 to 255, and three special ones behind them."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<pad>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


def make_model(seed: int) -> LlamaForCausalLM:
    """2.5 million parameters; a wide initializer, so that answers depend on the whole prompt."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=8192,
        initializer_range=0.08,
        tie_word_embeddings=False,
        bos_token_id=256,
        eos_token_id=257,
        pad_token_id=258,
        dtype="float32",
    )
    return LlamaForCausalLM(config).to(torch.float32)


def main() -> None:
    for folder, seed in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        make_tokenizer().save_pretrained(folder)
        make_model(int(seed)).save_pretrained(folder, safe_serialization=True)


if __name__ == "__main__":
    main()
