"""The driver of benchmarks.gpu_engine: hits in the pool beside hits in the engine's own prefix cache, and
decode beside endless loads and saves.

    python -m benchmarks.engine.card_driver FD CONFIG_JSON

As benchmarks.engine.driver; CONFIG_JSON may have "share_layers" (bool): dummy weights, see dummy_model.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from typing import Any

from benchmarks.engine.background import Background
from benchmarks.engine.driver import DRAIN_TIMEOUT_S, Driver, Stopwatch, main, stopwatch_s
from benchmarks.engine.dummy_model import give_weights

IDLE_S = 0.001  # vLLM's own loop sleeps so long after a step that ran nothing
FORGET_TRIES = 40
SHORT_TOKENS = 17


class OutermostStopwatch(Stopwatch):
    """A call inside of a call that is timed is not timed once more."""

    inside = False

    def call(self, function: Callable[..., Any]) -> Callable[..., Any]:
        timed = super().call(function)

        def outermost(*args: Any, **kwargs: Any) -> Any:
            if self.inside:
                return function(*args, **kwargs)
            self.inside = True
            try:
                return timed(*args, **kwargs)
            finally:
                self.inside = False

        return outermost


class CardDriver(Driver):
    def __init__(self, config: dict[str, Any]) -> None:
        share_layers = config.pop("share_layers", None)
        if share_layers is not None:
            give_weights(share_layers)
        self.vocabulary = config.pop("vocabulary")
        super().__init__(config)
        # vLLM seeds the one of the process alike in each engine: they would find these prompts in the pool.
        self.random = random.Random(os.urandom(16))
        self.decoding: list[str] = []
        self.executed = False
        step = self.core.step_fn

        def step_and_note() -> Any:
            outputs, self.executed = step()
            return outputs, self.executed

        self.core.step_fn = step_and_note
        # (requests, tokens) of the last two batches, the latest last, and the tokens of each request since it
        # was asked about; vLLM's own count of cached tokens is what a connector has promised.
        self.batches: list[tuple[int, int]] = [(0, 0)] * 2
        self.scheduled: dict[str, int] = {}
        schedule = self.scheduler.schedule

        def schedule_and_note(*arguments: Any, **named: Any) -> Any:
            output = schedule(*arguments, **named)
            tokens = output.num_scheduled_tokens
            batch = (len(tokens), output.total_num_scheduled_tokens)
            self.batches = [self.batches[-1], batch]
            if batch != (len(self.decoding),) * 2:  # decode alone is of no interest
                for name, count in tokens.items():
                    self.scheduled[name] = self.scheduled.get(name, 0) + count
            return output

        self.scheduler.schedule = schedule_and_note

    def add(self, prompt: list[int], tokens: int, logprobs: int | None = None) -> str:
        """The request's id."""
        return self._add(prompt, tokens, logprobs=logprobs, detokenize=False)

    # Hits

    def compute(self, prompts: list[list[int]]) -> int:
        """Computes each prompt, lets the connector save it, and forgets it. How many there were."""
        for prompt in prompts:
            self.answer(prompt)
            self.forget(1)
        self.forget(6)
        return len(prompts)

    def hit(self, prompt: list[int]) -> dict[str, Any]:
        """The prompt in an empty prefix cache, then twice with all of it there; answer's results.

        pool: computed where there is no connector. card: from the prefix cache. check: the same with more
        tokens and their log-probabilities, which read the KV that ``pool`` has brought.
        """
        self.forget(1)
        return {
            "pool": self.answer(prompt),
            "card": self.answer(prompt),
            "check": self.answer(prompt, tokens=4, logprobs=0),
        }

    def answer(self, prompt: list[int], tokens: int = 1, logprobs: int | None = None) -> dict[str, Any]:
        """first_s: time to the first token. cached: prompt tokens that were not computed. tokens, logprobs:
        of the answer."""
        self.scheduled.clear()
        started_s = time.perf_counter()
        self.add(prompt, tokens, logprobs=logprobs)
        first_s = 0.0
        while True:
            for output in self.step_as_served():
                answer = output.outputs[0]
                if answer.token_ids and not first_s:
                    first_s = time.perf_counter() - started_s
                if output.finished:
                    self.drain_as_served()
                    chosen = [
                        step[token].logprob
                        for token, step in zip(answer.token_ids, answer.logprobs or [], strict=False)
                    ]
                    return {
                        "first_s": first_s,
                        "cached": len(prompt) + tokens - 1 - sum(self.scheduled.values()),
                        "tokens": list(answer.token_ids),
                        "logprobs": chosen,
                    }

    def forget(self, least: int) -> int:
        """Empties the prefix cache. vLLM's OffloadingConnector submits the saves of a step with the next, so
        at least so many short requests run before. How many ran. Raises RuntimeError."""
        for number in range(1, FORGET_TRIES + 1):
            self.answer([self.random.randrange(3, self.vocabulary) for _ in range(SHORT_TOKENS)], tokens=2)
            if number >= least and self.llm.reset_prefix_cache():
                return number
            if number > 1:
                time.sleep(0.03)
        raise RuntimeError("the prefix cache is still in use")

    def step_as_served(self) -> list[Any]:
        """A step, and the pause that vLLM's own loop makes after one that ran nothing."""
        outputs: list[Any] = self.engine.step()
        if not self.executed and self.scheduler.has_requests():
            time.sleep(IDLE_S)
        return outputs

    def drain_as_served(self) -> None:
        """Steps until the connector holds nothing. Raises RuntimeError."""
        deadline_s = time.monotonic() + DRAIN_TIMEOUT_S
        while self.scheduler.has_requests():
            self.step_as_served()
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"the engine is still busy {DRAIN_TIMEOUT_S:g} s after the last request")

    # Decode

    def start_decoding(self, prompts: list[list[int]], tokens: int) -> int:
        """One answer of so many tokens to each prompt, side by side, until all of them decode."""
        self.forget(1)
        self.decoding = [self.add(prompt, tokens) for prompt in prompts]
        self.background = Background(self, requests=len(prompts))
        deadline_s = time.monotonic() + DRAIN_TIMEOUT_S
        while not self.background.is_quiet:
            self.background.step()
            if time.monotonic() > deadline_s:
                raise RuntimeError("not all requests decode")
        return len(prompts)

    def decode_quiet(self, steps: int) -> dict[str, Any]:
        """Seconds of steps with nothing beside."""
        return self.background.run_quiet(steps)

    def decode_beside(
        self, loads: list[list[int]], fresh: list[list[int]], steps: int, seconds: float
    ) -> dict[str, Any]:
        """See Background.run."""
        return self.background.run(loads, fresh, steps, seconds)

    def decode_hooks(self, steps: int) -> dict[str, Any] | None:
        """step_us: microseconds of each step in the methods of the scheduler's and the worker's connector.
        method_us: of those that took most, the mean a step."""
        if self.scheduler.connector is None:
            return None
        from vllm.distributed.kv_transfer import get_kv_transfer_group
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

        watch = OutermostStopwatch(stopwatch_s(OutermostStopwatch))
        methods: dict[str, float] = {}

        def note(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
            timed = watch.call(function)

            def noted(*args: Any, **kwargs: Any) -> Any:
                before_s = watch.spent_s
                result = timed(*args, **kwargs)
                methods[name] = methods.get(name, 0.0) + watch.spent_s - before_s
                return result

            return noted

        connectors = [self.scheduler.connector, get_kv_transfer_group()]
        names = [
            name
            for name in dir(KVConnectorBase_V1)
            if not name.startswith("_") and callable(vars(KVConnectorBase_V1).get(name))
        ]
        for connector in connectors:
            for name in names:
                setattr(connector, name, note(name, getattr(connector, name)))
        try:
            samples = []
            for _ in range(steps):
                self.background.step()
                samples.append(watch.take_us())
        finally:
            for connector in connectors:
                for name in names:
                    delattr(connector, name)
        if not watch.seen:
            raise RuntimeError("this vLLM calls the connector elsewhere: it was not timed")
        most = sorted(methods.items(), key=lambda item: -item[1])[:6]
        return {
            "step_us": samples[2:],
            "method_us": {name: round(seconds * 1e6 / steps, 1) for name, seconds in most},
        }

    def end_decoding(self) -> None:
        self.engine.abort_request(self.decoding)
        self.drain_as_served()


if __name__ == "__main__":
    main(CardDriver)
