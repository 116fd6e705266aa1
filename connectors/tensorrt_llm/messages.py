"""What the scheduler's half tells the workers with each step. Plain values, since they cross processes by
pickle."""

from __future__ import annotations

from dataclasses import dataclass, field

Pages = tuple[tuple[int, ...], ...]  # by layer group, then by block; compat.NO_PAGE: none there


@dataclass(frozen=True, slots=True)
class Load:
    """Blocks that were promised to a parked request.

    digests: 32 bytes each, in the order of the pages; none where the promise was withdrawn while the engine
        still waits for its end.
    """

    request_id: int
    digests: bytes
    pages: Pages


@dataclass(frozen=True, slots=True)
class Save:
    """Blocks that are full when the step ends.

    previous: digest of the block before them, or b"".
    """

    request_id: int
    previous: bytes
    digests: bytes
    pages: Pages


@dataclass(frozen=True, slots=True)
class Plan:
    """What the workers do in one step.

    written: pages that the step's requests got and write to, by layer group; None: any page.
    """

    loads: tuple[Load, ...] = field(default=())
    saves: tuple[Save, ...] = field(default=())
    written: Pages | None = field(default=())
