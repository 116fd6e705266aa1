"""The driver of benchmarks.load_or_compute: hits that are loaded over a link of a given speed.

python -m benchmarks.engine.hits_driver FD CONFIG_JSON
"""

from __future__ import annotations

import time
from typing import Any

from benchmarks.engine.driver import Driver, main
from benchmarks.engine.shaped import Link


class HitsDriver(Driver):
    def set_link(self, bytes_per_s: float) -> None:
        """From now on loads go through a link of that speed, and none was measured."""
        from moonpool.connectors.vllm.load_decision import Tier

        Link(bytes_per_s)
        decision = self.scheduler.connector._sched._decision
        if decision is not None:
            decision._memory = Tier()

    def hit(self, prompt: list[int], loads: bool = True) -> dict[str, Any]:
        """A prompt that the pool has and the engine has not, up to its first token. Nothing of it is stored.

        loads: whether the pool may be used. first_s: time to the token; reason: of the choice, "" without
        one; pool_tokens: of the prompt that were loaded.
        """
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("the engine's own cache could not be emptied")
        started_s = time.perf_counter()
        self._add(prompt, 1, {"moonpool": {"load": loads, "store": False, "explain": True}})
        while True:
            for output in self.engine.step():
                if output.outputs[0].token_ids:
                    first_s = time.perf_counter() - started_s
                    ours = output.kv_transfer_params["moonpool"]
                    self._drain()
                    return {
                        "first_s": first_s,
                        "token": output.outputs[0].token_ids[0],
                        "reason": ours.get("decision", {}).get("reason", ""),
                        "pool_tokens": ours["pool_tokens"],
                    }


if __name__ == "__main__":
    main(HitsDriver)
