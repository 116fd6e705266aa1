"""The driver of benchmarks.simulator_vs_vllm, where requests come at their times and each step is recorded,
and of benchmarks.conductor_stepped, which asks for each step.

    python -m benchmarks.engine.steps_driver FD CONFIG_JSON

As benchmarks.engine.driver, with dummy weights (dummy_model).
"""

from __future__ import annotations

import time
from typing import Any

from benchmarks.engine.driver import Driver, main
from benchmarks.engine.dummy_model import give_weights
from benchmarks.engine.fleet import prompt


class StepsDriver(Driver):
    def __init__(self, config: dict[str, Any]) -> None:
        give_weights(share_layers=False)
        super().__init__(config)
        self.computed: list[tuple[str, int, int]] = []  # of the last step: name, tokens before, computed
        self.numbers: dict[str, int] = {}  # of requests that were submitted and have not ended
        self.begun: set[int] = set()  # those of which a token was computed
        self.answered: set[int] = set()
        schedule = self.scheduler.schedule

        def schedule_and_note(*arguments: Any, **named: Any) -> Any:
            output = schedule(*arguments, **named)
            before = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
            cached = output.scheduled_cached_reqs
            before |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
            self.computed = [
                (name, before[name], count) for name, count in output.num_scheduled_tokens.items()
            ]
            return output

        self.scheduler.schedule = schedule_and_note

    def run(self, requests: list[list[float]], name: str) -> dict[str, Any]:
        """requests: [seconds from the begin, tokens of the prompt, tokens of the answer], by time. name: of
        the run; two runs share no prompt. The clock is the CPU time of this process, which is one thread, and
        goes on at once to the next arrival while nothing is to be done.

        steps: {seconds, wall_s; chunks: [request, first token, token after the last] of prompts; decoding:
        tokens in the KV cache of each request that gets its next token}. first_s: of each request, from its
        arrival to the end of the step with its first token.
        """
        prompts = [prompt(int(tokens), f"{name}/{number}") for number, (_, tokens, _) in enumerate(requests)]
        first_s = [0.0] * len(requests)
        steps: list[dict[str, Any]] = []
        numbers: dict[str, int] = {}
        begun_s = time.process_time()
        while len(numbers) < len(requests) or self.scheduler.has_requests():
            now_s = time.process_time() - begun_s
            if not self.scheduler.has_requests() and requests[len(numbers)][0] > now_s:
                begun_s -= requests[len(numbers)][0] - now_s
                continue
            while len(numbers) < len(requests) and requests[len(numbers)][0] <= now_s:
                number = len(numbers)
                numbers[self._add(prompts[number], int(requests[number][2]))] = number
            started_s, wall_s = time.process_time(), time.perf_counter()
            outputs = self.engine.step()
            ended_s, wall_s = time.process_time(), time.perf_counter() - wall_s
            for output in outputs:
                number = numbers[output.request_id]
                if output.outputs[0].token_ids and not first_s[number]:
                    first_s[number] = ended_s - begun_s - requests[number][0]
            step: dict[str, Any] = {"seconds": ended_s - started_s, "wall_s": wall_s}
            step["chunks"], step["decoding"] = [], []
            for each, before, count in self.computed:
                number = numbers[each.rpartition("-")[0] or each]  # vLLM adds a suffix to a caller's id
                if before < requests[number][1]:
                    step["chunks"].append([number, before, before + count])
                else:
                    step["decoding"].append(before)
            if self.computed:  # vLLM's last step only lets go of what has ended
                steps.append(step)
        return {"steps": steps, "first_s": first_s}

    def submit(self, number: int, ids: list[int], answer_tokens: int) -> None:
        """A request for ``step``. number: one that none has that has not ended."""
        self.numbers[self._add(ids, answer_tokens)] = number

    def step(self) -> dict[str, Any]:
        """seconds: CPU time of this process. begun: requests whose first tokens the step computed; first:
        [request, cached tokens of its prompt] of those that got their first token; ended."""
        started_s = time.process_time()
        outputs = self.engine.step()
        seconds = time.process_time() - started_s
        scheduled = {self.numbers[name.rpartition("-")[0] or name] for name, _, _ in self.computed}
        begun, self.begun = scheduled - self.begun, self.begun | scheduled
        first, ended = [], []
        for output in outputs:
            number = self.numbers[output.request_id]
            if output.outputs[0].token_ids and number not in self.answered:
                self.answered.add(number)
                first.append([number, output.num_cached_tokens])
            if output.finished:
                ended.append(number)
                del self.numbers[output.request_id]
                self.begun.discard(number)
                self.answered.discard(number)
        return {"seconds": seconds, "begun": list(begun), "first": first, "ended": ended}


if __name__ == "__main__":
    main(StepsDriver)
