"""The names of the buffer of expert parallelism, which is not supported.

Importing them works and using them raises ImportError, as with an original built without expert parallelism.
"""

from __future__ import annotations

from typing import Any, NoReturn

_SENTENCE = (
    "mooncake.mooncake_ep_buffer moves the tokens of experts between devices; moonpool has none, so take "
    "another all-to-all backend"
)


class EventOverlap:
    """An event to wait for; without one there is nothing to wait for."""

    def __init__(self, event: Any = None, extra_tensors: Any = None) -> None:
        self.event, self.extra_tensors = event, extra_tensors

    def current_stream_wait(self) -> None:
        """Returns without an event; raises ImportError with one."""
        if self.event is not None:
            _refuse()

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *_: object) -> None:
        if self.event is not None:
            self.current_stream_wait()


class Buffer:
    """Raises ImportError when it is made."""

    def __init__(self, group: Any, num_ep_buffer_bytes: int = 0, disable_p2p: bool = False) -> None:
        _refuse()

    @staticmethod
    def get_ep_buffer_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Raises ImportError: there are no buffers of expert parallelism here."""
        _refuse()


def _refuse() -> NoReturn:
    raise ImportError(_SENTENCE, name="mooncake.ep")
