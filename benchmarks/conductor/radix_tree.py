"""`radix_tree.py WORKERS BLOCKS BLOCK_TOKENS`: the same work with Dynamo's RadixTree (ai-dynamo-runtime).

Its hashes come from its own compute_block_hash_for_seq; its events are the JSON that its binding takes.
"""

from __future__ import annotations

import json
import random
import sys
import time

from dynamo.llm import RadixTree, compute_block_hash_for_seq

ROUNDS = 2000
EVENTS = 100


def stored(hashes: list[int], names: list[int]) -> bytes:
    blocks = [{"block_hash": name, "tokens_hash": h} for name, h in zip(names, hashes, strict=True)]
    data = {"stored": {"parent_hash": None, "blocks": blocks}}
    return json.dumps({"event_id": 1, "data": data, "dp_rank": 0}).encode()


def cpu_us(call: object, rounds: int) -> float:
    """CPU of the whole process: the tree works on a thread of its own."""
    start_s = time.process_time()
    for _ in range(rounds):
        call()  # type: ignore[operator]
    return (time.process_time() - start_s) / rounds * 1e6


def main() -> None:
    workers, blocks, block_tokens = map(int, sys.argv[1:])
    rng = random.Random(1)
    prompt = [rng.randrange(50_000) for _ in range(blocks * block_tokens)]
    hashes = compute_block_hash_for_seq(prompt, block_tokens)
    tree = RadixTree()
    for worker in range(workers):
        share = blocks - 4 * worker
        names = [rng.randrange(1 << 63) for _ in range(share)]
        tree.apply_event(worker, stored(hashes[:share], names))
    scores = tree.find_matches(hashes).scores
    assert max(scores.values()) == blocks, scores
    events = []
    for _ in range(EVENTS):
        tokens = [rng.randrange(50_000) for _ in range(64 * block_tokens)]
        local = compute_block_hash_for_seq(tokens, block_tokens)
        events.append(stored(local, [rng.randrange(1 << 63) for _ in local]))
    waiting = iter(events)
    decision = prompt[:4608]

    def decide() -> None:
        tree.find_matches(compute_block_hash_for_seq(decision, block_tokens))

    print(
        json.dumps(
            {
                "match": cpu_us(lambda: tree.find_matches(hashes), ROUNDS),
                "ingest": cpu_us(lambda: tree.apply_event(0, next(waiting)), EVENTS),
                "decision": cpu_us(decide, ROUNDS // 4),
            }
        )
    )


if __name__ == "__main__":
    main()
