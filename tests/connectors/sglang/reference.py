"""What Hugging Face says to some prompts, run by a Python with SGLang: ``reference.py MODEL`` reads a JSON
list of prompts (token ids) and writes, for each, 16 greedy tokens and the logprobs of the prompt's own tokens
but the first."""

from __future__ import annotations

import json
import sys

MAX_TOKENS = 16


def main() -> None:
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
    model.generation_config.eos_token_id = None
    answers = []
    for prompt in json.load(sys.stdin):
        with torch.no_grad():
            given = torch.tensor([prompt])
            mask = torch.ones_like(given)  # else it would take one of the prompt's ids for padding
            logprobs = model(given, attention_mask=mask).logits[0].log_softmax(-1)
            ids = model.generate(
                given, attention_mask=mask, max_new_tokens=MAX_TOKENS, do_sample=False, pad_token_id=0
            )
        told = [float(logprobs[at - 1, prompt[at]]) for at in range(1, len(prompt))]
        answers.append({"tokens": ids[0, len(prompt) :].tolist(), "logprobs": told})
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
