"""What a mock engine is told at its start."""

from __future__ import annotations

from dataclasses import dataclass, field

from moonpool.core.errors import ConfigError
from moonpool.disagg_proxy.tools.mock_engine.timing import Timing


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
