"""What Hugging Face says to some prompts, and how sure it is: ``decided.py MODEL`` makes the tiny model of
reference.py, reads a JSON list of prompts and writes for each its 16 greedy tokens and the smallest distance
between the best and the second best logit on the way. SGLang adds the same bfloat16 numbers in another order:
it says the same as long as that distance is more than rounding.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import reference  # beside it


def main() -> None:
    folder = Path(sys.argv[1])
    reference.make(folder)
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    answers = []
    for prompt in json.load(sys.stdin):
        with torch.no_grad():
            made = model.generate(
                torch.tensor([prompt]),
                max_new_tokens=reference.MAX_TOKENS,
                do_sample=False,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
        best = torch.stack([logits[0].float().topk(2).values for logits in made.logits])
        distance = float((best[:, 0] - best[:, 1]).min())
        answers.append((made.sequences[0, len(prompt) :].tolist(), distance))
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
