"""`selection_service.py WORKERS TOKENS BLOCK_TOKENS`: the same decision by Dynamo's SelectionService
(ai-dynamo-runtime), the selection of its router without the HTTP around it.

A decision is select_and_reserve with the ids of the prompt; and, as a reservation must be ended, too, what
ours counts elsewhere is left out: prefill_complete and free_reservation are not timed. Its workers tell no
events, so its index is empty, which spares it work. Prints microseconds of the process's CPU, the median.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import tempfile
import time

from dynamo.llm import SelectionService

ROUNDS = 21
BATCH = 32


async def main() -> None:
    workers, tokens, block_tokens = map(int, sys.argv[1:])
    rng = random.Random(1)
    service = SelectionService(indexer_threads=1)
    with tempfile.TemporaryDirectory() as folder:
        for worker in range(workers):
            await service.upsert_worker(
                {
                    "worker_id": worker,
                    "model_name": "m",
                    "routing_group": "default",
                    "endpoint": f"http://w{worker}",
                    "block_size": block_tokens,
                    "data_parallel_start_rank": 0,
                    "data_parallel_size": 1,
                    "kv_events_endpoint": f"ipc://{folder}/events",
                }
            )
        found = []
        for turn in range(ROUNDS + 1):
            prompts = [[rng.randrange(50_000) for _ in range(tokens)] for _ in range(BATCH)]
            start_s = time.process_time()
            for number, prompt in enumerate(prompts):
                await service.select_and_reserve(
                    {
                        "selection_id": f"{turn}-{number}",
                        "model_name": "m",
                        "routing_group": "default",
                        "token_ids": prompt,
                        "expected_output_tokens": 64,
                    }
                )
            found.append((time.process_time() - start_s) / BATCH * 1e6)
            for number in range(BATCH):
                await service.prefill_complete(f"{turn}-{number}")
                await service.free_reservation(f"{turn}-{number}")
        service.shutdown()
    print(statistics.median(found[1:]))


if __name__ == "__main__":
    asyncio.run(main())
