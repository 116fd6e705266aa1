"""A prefill engine's worker with its KV cache on a card, in a process of its own, so that it can be killed:
``card_world_process.py LIBRARY BLOCKS...``. Says its offer of these blocks, then waits for its end."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from tests.connectors.vllm.pd.worlds import world
from tests.soft_card import soft_card

NAME, SEED = "P", 1


def main() -> None:
    with (
        soft_card(Path(sys.argv[1])) as card,
        world(NAME, seed=SEED, card=card) as prefill,
    ):
        offer = asdict(prefill.offer([int(block) for block in sys.argv[2:]]))
        print(json.dumps(offer | {name: offer[name].hex() for name in ("fingerprint", "prompt")}), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
