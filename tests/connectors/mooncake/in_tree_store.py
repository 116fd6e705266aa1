"""vLLM's own MooncakeStoreConnector over the drop-in: ``in_tree_store.py MODEL``. After a line on stdin it
runs its prompts, says as JSON what it answered and how many tokens of each it did not compute, and waits for
the end of stdin.

On a CPU the connector needs two names of torch that only a GPU has; nothing of vLLM or of the drop-in is
changed.
"""

from __future__ import annotations

import json
import os
import random
import sys
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import torch

PROMPTS, PROMPT_TOKENS, BLOCK_TOKENS = 3, 300, 32


class NoEvent:
    """What torch.cuda.Event is where there is nothing to wait for."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...


torch.accelerator.current_device_index = lambda: 0
torch.cuda.Event = NoEvent  # type: ignore[assignment, misc]

from vllm import LLM, SamplingParams  # noqa: E402
from vllm.config import KVTransferConfig  # noqa: E402


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM writes to stdout as it likes
    llm = LLM(
        model=sys.argv[1],
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=4,
        block_size=BLOCK_TOKENS,
        enforce_eager=True,
        seed=0,
        kv_cache_memory_bytes=64 << 20,
        kv_transfer_config=KVTransferConfig(
            kv_connector="MooncakeStoreConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"lookup_rpc_port": str(os.getpid())},
        ),
    )
    source = random.Random(7)
    prompts = [
        {"prompt_token_ids": [source.randrange(256) for _ in range(PROMPT_TOKENS)]} for _ in range(PROMPTS)
    ]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    sys.stdin.readline()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    said = {
        "tokens": [list(one.outputs[0].token_ids) for one in outputs],
        "cached": [one.num_cached_tokens for one in outputs],
    }
    print(json.dumps(said), file=answers, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
