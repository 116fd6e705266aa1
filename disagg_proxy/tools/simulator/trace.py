"""Traces of requests: the JSON lines that the Mooncake paper's were published in (FAST '25).

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48, ...]}

timestamp: milliseconds; a hash id names 512 tokens of the prompt and all that stands before them, the last of
them maybe fewer. Times that were rounded (many requests share each) are spread again, or each burst would
queue: ``Trace.arrivals``.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby, pairwise
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from moonpool.core.errors import ConfigError

BLOCK_TOKENS = 512

_Count = Annotated[int, Meta(ge=0, le=1 << 31)]
_Id = Annotated[int, Meta(ge=0, lt=1 << 48)]


class _Row(msgspec.Struct):
    timestamp: Annotated[float, Meta(ge=0, le=1e12)]
    input_length: Annotated[int, Meta(ge=1, le=1 << 31)]
    output_length: _Count
    hash_ids: list[_Id]


class Arrival(NamedTuple):
    """blocks: ids of the prompt's blocks of BLOCK_TOKENS, the last one maybe partly filled."""

    at_s: float
    tokens: int
    answer_tokens: int
    blocks: Sequence[int]

    @property
    def full_blocks(self) -> Sequence[int]:
        """Those that a cache may keep: all of whose tokens are there, and not the prompt's very last token,
        which is computed whatever is cached."""
        return self.blocks[: (self.tokens - 1) // BLOCK_TOKENS]


class Trace:
    """rows: by time, times in seconds from the first one on; gone through once here and once for each use, so
    that a file need not be held in memory. seconds: from the first to the last."""

    def __init__(self, name: str, rows: Iterable[Arrival]) -> None:
        self.name = name
        self.rows = rows
        self.seconds = 0.0
        self._count = 0
        self._blocks_end = 1
        sizes: list[tuple[float, int]] = []  # (time, requests)
        for at_s, group in groupby(rows, key=lambda row: row.at_s):
            size = 0
            for row in group:
                size += 1
                self._blocks_end = max(self._blocks_end, max(row.blocks, default=0) + 1)
            sizes.append((at_s, size))
            self._count += size
            self.seconds = at_s
        self.quantum_s = _quantum_s(sizes)

    def __len__(self) -> int:
        return self._count

    def arrivals(self, *, speed: float = 1.0, seed: int = 0, copies: int = 1) -> Iterator[Arrival]:
        """The requests in order, ``speed`` times as fast, rounded times spread evenly at random.

        copies: so many independent groups of users do all of it at the same time; their prompts have nothing
        in common. Made while it is read, so that a million requests take no memory. Raises ConfigError when
        the file is another one by now.
        """
        chance = random.Random(seed)
        apart = self._blocks_end
        count = 0
        groups = ((at_s, list(group)) for at_s, group in groupby(self.rows, key=lambda row: row.at_s))
        for (at_s, group), (next_s, _) in pairwise(chain(groups, [(math.inf, [])])):
            count += len(group)
            rows = [(row, copy) for row in group for copy in range(copies)]
            width_s = min(self.quantum_s, next_s - at_s)  # steps between rounded times differ a little
            spread = sorted((chance.random() * width_s, place) for place in range(len(rows)))
            for later_s, place in spread:
                row, copy = rows[place]
                blocks = [block + copy * apart for block in row.blocks] if copy else row.blocks
                yield Arrival((at_s + later_s) / speed, row.tokens, row.answer_tokens, blocks)
        if count != self._count:
            raise ConfigError(
                f"the trace {self.name} had {self._count} requests when it was read first, and has {count} "
                "now",
                operation="simulate",
            )


class _File:
    """The rows of a trace file, read anew by each iteration."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __iter__(self) -> Iterator[Arrival]:
        path = self._path
        decode = msgspec.json.Decoder(_Row).decode
        first_ms = last_ms = -1.0
        try:
            with path.open("rb") as lines:
                for number, line in enumerate(lines, 1):
                    if not line.strip():
                        continue
                    try:
                        row = decode(line)
                    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                        raise _bad(path, number, f"is no request of a trace: {error}") from error
                    if first_ms < 0:
                        first_ms = row.timestamp
                    if row.timestamp < last_ms:
                        raise _bad(
                            path,
                            number,
                            f"has timestamp {row.timestamp:g}, before the line above; sort it by time",
                        )
                    last_ms = row.timestamp
                    wanted = -(-row.input_length // BLOCK_TOKENS)
                    if len(row.hash_ids) != wanted:
                        raise _bad(
                            path,
                            number,
                            f"has {len(row.hash_ids)} hash_ids; {row.input_length} tokens are {wanted} "
                            f"blocks of {BLOCK_TOKENS}",
                        )
                    at_s = (last_ms - first_ms) / 1000
                    yield Arrival(at_s, row.input_length, row.output_length, row.hash_ids)
        except OSError as error:
            raise ConfigError(f"the trace {path} cannot be read: {error}", operation="simulate") from error


def read_trace(path: Path) -> Trace:
    """Raises ConfigError that names the file and the line: no JSON, a field that is missing or absurd, ids
    that do not fit the length, a time before the one above it, no request at all.

    What can be read only once, a pipe, is kept in memory.
    """
    rows = _File(path)
    trace = Trace(path.stem, rows if path.is_file() else list(rows))
    if not len(trace):
        raise ConfigError(f"the trace {path} has no request", operation="simulate")
    return trace


def _quantum_s(sizes: Sequence[tuple[float, int]]) -> float:
    """What times were rounded to: the median step between different times, where most requests share theirs
    with another; else 0. sizes: (time, how many requests)."""
    shared = sum(size for _, size in sizes if size > 1)
    if len(sizes) < 2 or shared * 2 < sum(size for _, size in sizes):
        return 0.0
    steps = sorted(later[0] - sooner[0] for sooner, later in pairwise(sizes))
    return float(steps[len(steps) // 2])


def _bad(path: Path, number: int, what: str) -> ConfigError:
    return ConfigError(f"{path}, line {number}, {what}", operation="simulate")
