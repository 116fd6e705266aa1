"""What a simulated instance can do: seconds of prefill and decode, bytes of KV, sizes of caches, links.

``paper`` is LLaMA3-70B on 8 A800, as the Mooncake paper measured it (FAST '25, figure 14; the fit is within
1.5 % of its points from 8 k to 128 k tokens). ``h100_fp8`` is derived from it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import get_type_hints

import msgspec

from moonpool.core.errors import ConfigError

# The figures of a machine that are seconds of computing; the others are of links and memory.
COMPUTED = (
    "prefill_s",
    "prefill_token_s",
    "prefill_token2_s",
    "step_s",
    "step_request_s",
    "step_token_s",
)


@dataclass(frozen=True, slots=True)
class Machine:
    """Seconds, tokens, bytes a second. All must be finite; counts of tokens positive, the rest not negative.

    prefill of n tokens of which r are reused:
                  prefill_s + prefill_token_s (n - r) + prefill_token2_s (n^2 - r^2) + reuse_token_s r
    decode step:  step_s + step_request_s batch + step_token_s (tokens of the batch in the KV cache)
    step of both: the sum, with the larger of prefill_s and step_s for both: the weights are read once

    kv_bytes:     of one token.
    cache_tokens: of the prefix cache: the memory that an instance gives to the pool.
    room_tokens:  that decode has room for; a request that does not fit waits.
    link_bytes_s: of an instance's network, in each direction.
    handover_s:   between the end of a prefill and the first step of decode elsewhere, besides what the links
                  need.
    """

    prefill_s: float
    prefill_token_s: float
    prefill_token2_s: float
    reuse_token_s: float
    step_s: float
    step_request_s: float
    step_token_s: float
    kv_bytes: int
    cache_tokens: int
    room_tokens: int
    link_bytes_s: float
    handover_s: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 1 if field.name in ("kv_bytes", "room_tokens", "link_bytes_s") else 0
            if not least <= value < float("inf"):
                raise ConfigError(
                    f"a machine's {field.name} must be {'positive' if least else 'at least 0'}, not {value}",
                    operation="simulate",
                    key=field.name,
                )
        if not self.step_s + self.step_request_s > 0:
            raise ConfigError("a decode step must take some time", operation="simulate", key="step_s")

    def compute_s(self, tokens: int, reused: int = 0) -> float:
        """Seconds of a prefill whose reused tokens are in this instance's cache."""
        return self.prefill_s + self._tokens_s(tokens, reused) + self.reuse_token_s * reused

    def chunks_s(self, chunks: Iterable[tuple[int, int]], *, in_decode_step: bool) -> float:
        """Seconds of one step that computes these parts of prompts, (first token, token after the last) each;
        in_decode_step: seconds by which a decode step with them in it takes longer. What is reused must be
        loaded before."""
        constant_s = max(self.prefill_s - self.step_s, 0.0) if in_decode_step else self.prefill_s
        return constant_s + sum(self._tokens_s(end, begin) for begin, end in chunks)

    def step_of_s(self, batch: float, context_tokens: float) -> float:
        """Seconds of one decode step of ``batch`` requests with ``context_tokens`` tokens in all in the KV
        cache."""
        return self.step_s + self.step_request_s * batch + self.step_token_s * context_tokens

    def _tokens_s(self, end: int, begin: int) -> float:
        squares_s = self.prefill_token2_s * (end * end - begin * begin)
        return self.prefill_token_s * (end - begin) + squares_s

    def faster(self, times: float) -> Machine:
        """The same machine with so many times the compute; links and memory stay."""
        return replace(self, **{name: getattr(self, name) / times for name in COMPUTED})


_PAPER = Machine(
    prefill_s=0.06,
    prefill_token_s=1.146e-4,
    prefill_token2_s=7.194e-10,
    reuse_token_s=2.4e-6,
    step_s=0.0262,
    step_request_s=0.0002,
    step_token_s=3.6e-8,
    kv_bytes=327_680,
    cache_tokens=3_000_000,
    room_tokens=1_200_000,
    link_bytes_s=87e9,
    handover_s=0.02,
)

# The same model in FP8 on 8 H100 SXM, from the vendors' figures, not measured: 1,979 TFLOPS of FP8 for 312 of
# BF16; HBM of 3.35 TB/s for 2.04, and weights of half the size; KV stays BF16. The host has PCIe 5 for 4,
# the network 8 x 400 Gbit/s, of which the paper measured 190 GB/s. The room grows by the weights' 70 GB.
_FLOPS = 1979 / 312
_HBM = 3.35 / 2.04

MACHINES = {
    "paper": _PAPER,
    "h100_fp8": replace(
        _PAPER,
        prefill_s=_PAPER.prefill_s / _FLOPS,
        prefill_token_s=_PAPER.prefill_token_s / _FLOPS,
        prefill_token2_s=_PAPER.prefill_token2_s / _FLOPS,
        reuse_token_s=_PAPER.reuse_token_s / 2,
        step_s=_PAPER.step_s / (2 * _HBM),
        step_request_s=_PAPER.step_request_s / _FLOPS,
        step_token_s=_PAPER.step_token_s / _HBM,
        room_tokens=_PAPER.room_tokens + int(70e9 / _PAPER.kv_bytes),
        link_bytes_s=190e9,
    ),
}


# What a file says of a machine: Machine's fields, and like: the machine that supplies those not given.
_Own = msgspec.defstruct(
    "_Own",
    [("like", str, "paper"), *((name, kind | None, None) for name, kind in get_type_hints(Machine).items())],
    forbid_unknown_fields=True,
)


def find_machine(name: str) -> Machine:
    """One of MACHINES, or, for a name that ends in .json, that file's: an object of Machine's fields, and
    ``like``, the machine that has the others. Raises ConfigError."""
    if not name.endswith(".json"):
        return _known(name)
    try:
        own = msgspec.json.decode(Path(name).read_bytes(), type=_Own)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"the machine {name} cannot be read: {error}", operation="simulate") from error
    said = {field: value for field, value in msgspec.structs.asdict(own).items() if value is not None}
    return replace(_known(said.pop("like")), **said)


def _known(name: str) -> Machine:
    if name not in MACHINES:
        raise ConfigError(
            f"--machine knows {', '.join(MACHINES)} and files whose name ends in .json, not {name}",
            operation="simulate",
        )
    return MACHINES[name]
