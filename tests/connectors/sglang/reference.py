"""What Hugging Face says to some prompts, run by a Python with SGLang: ``reference.py MODEL`` makes the tiny
model there if there is none, reads a JSON list of prompts (token ids) and writes the list of 16 greedy tokens
for each."""

from __future__ import annotations

import json
import sys
from pathlib import Path

MAX_TOKENS = 16


def make(folder: Path) -> None:
    """A model of random weights: grouped heads, bfloat16. Prompts are token ids, so it needs no tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        eos_token_id=None,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def main() -> None:
    folder = Path(sys.argv[1])
    if not folder.exists():
        make(folder)
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    answers = []
    for prompt in json.load(sys.stdin):
        with torch.no_grad():
            ids = model.generate(
                torch.tensor([prompt]), max_new_tokens=MAX_TOKENS, do_sample=False, pad_token_id=0
            )
        answers.append(ids[0, len(prompt) :].tolist())
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
