"""The settings of a mock engine, and its timing model."""

from __future__ import annotations

from dataclasses import dataclass, field

from moonpool.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one step = step_s + gap_s_per_request x decodes + the prefill of its chunk, where a prefill
    of tokens [done, done + n) costs n x prefill_s_per_token + quadratic x ((done + n)^2 - done^2). All 0: at
    once.
    """

    step_s: float = 0.0
    prefill_s_per_token: float = 0.0
    prefill_s_per_token2: float = 0.0
    gap_s_per_request: float = 0.0
    handover_s_per_token: float = 0.0

    @property
    def is_instant(self) -> bool:
        """Whether everything takes no time: a step then makes a whole answer."""
        return not (
            self.step_s or self.prefill_s_per_token or self.prefill_s_per_token2 or self.gap_s_per_request
        )

    def chunk_s(self, done: int, tokens: int) -> float:
        """Seconds of prefill of ``tokens`` tokens behind ``done`` that are in the cache, without step_s."""
        end = done + tokens
        return tokens * self.prefill_s_per_token + (end * end - done * done) * self.prefill_s_per_token2


@dataclass(frozen=True, slots=True)
class MockSettings:
    """blocks: of its KV cache, block_tokens each; lease_s: how long a prefill engine keeps what no
    engine fetches; events, replay: ZMQ endpoints, "" for none; sglang: the disaggregation mode of an engine
    like SGLang's (null, prefill or decode), "" for one like vLLM. Raises ConfigError for what cannot be
    meant.
    """

    host: str = "127.0.0.1"
    port: int = 8100
    model: str = "mock"
    blocks: int = 4096
    block_tokens: int = 16
    step_tokens: int = 8192
    requests_max: int = 256
    answer_tokens: int = 16
    lease_s: float = 10.0
    events: str = ""
    replay: str = ""
    sglang: str = ""
    timing: Timing = field(default_factory=Timing)

    def __post_init__(self) -> None:
        for name in ("blocks", "block_tokens", "step_tokens", "requests_max", "answer_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"mock-engine: {name} is at least 1", operation="config", key=name)
        if self.sglang not in ("", "null", "prefill", "decode"):
            raise ConfigError(
                f"mock-engine: sglang is null, prefill or decode, not {self.sglang!r}",
                operation="config",
                key="sglang",
            )
        if self.lease_s <= 0:
            raise ConfigError("mock-engine: lease_s is more than 0", operation="config", key="lease_s")
