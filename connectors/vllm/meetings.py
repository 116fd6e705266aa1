"""Hits of which the front is computed while the back is loaded, until the two meet (arXiv 2410.03065).

    blocks of the hit  0        front ->        low           end
                       | computed | unclaimed   | back, loaded |
                                  +--- gap -----+ <- claims

The engine computes chunks from the front upward; each step claims pieces for loads from ``low`` downward, and
no block is ever both: a chunk ends at the lowest claimed block at the latest (``chunk_tokens``), and a piece
is claimed only above what steps were planned to compute. Where the front has reached a piece that is loaded,
the request is moved behind it (``jump``), as if the engine had computed it. A piece that failed belongs to
the front again, which computes it.

How much is claimed: what the loads take during two steps, and at most the share of the rest that they are
predicted to load in the time in which the front computes the other share. Hits that are loaded at the same
time share the link: each counts on an equal part of it.

Pieces hold their blocks by a reference each, as saves do, so requests may end or be preempted at any time.
The pin of the hit is given up when the meeting is over and no piece reads it. All methods run on the
scheduler's thread; the scheduler class (meeting_scheduler.py) and the scheduler's half call them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from moonpool.connectors.vllm.engine_types import Block, BlockPool, Blocks, Request, SchedulerOutput
from moonpool.connectors.vllm.group_blocks import by_part
from moonpool.connectors.vllm.load_decision import BOTH, SLOWER, Pace
from moonpool.connectors.vllm.messages import Load, PieceEnd
from moonpool.connectors.vllm.metrics import Tally
from moonpool.connectors.vllm.requests import Phase, RequestState
from moonpool.connectors.vllm.requests.state import Hit

CHUNK_TOKENS_MIN = 256  # of a chunk while loads go on: a smaller one costs more than it gains
CHUNKS = 3  # a chunk is this part of what the front is predicted to compute until the two meet
STEPS_AHEAD = 2  # claims cover so many steps: the next is made when one has ended
DESCRIPTOR_BYTES = 32


@dataclass(slots=True)
class Piece:
    """The blocks [first, last) of a hit while they are loaded.

    blocks: the engine's, with a reference each until the load has ended.
    ranks: that have not reported its end.
    good: leading blocks that came, on all ranks so far.
    seconds: of the slowest rank.
    """

    meeting: Meeting
    first: int
    last: int
    blocks: list[Block]
    ranks: int
    good: int
    seconds: float = 0.0


@dataclass(slots=True, eq=False)
class Meeting:
    """One hit. Counts in blocks from the prompt's first one.

    block_ids: of the whole hit, one list per KV cache group.
    low: the lowest block that was ever claimed; from there to ``end`` are pieces.
    loaded: where each loaded part begins and ends that the front has not reached.
    flying: pieces under way.
    claims: whether pieces are claimed; not after one failed.
    step_s, step_tokens: when the last step was planned, and how many tokens of the request it computes.
    void: whether what is loaded counts for nothing: the request goes on without the pool.
    over: whether the request is over, or has other blocks.
    """

    request: Request
    state: RequestState
    hit: Hit
    block_ids: tuple[list[int], ...]
    pace: Pace
    preemptions: int
    low: int
    end: int
    loaded: dict[int, int] = field(default_factory=dict)
    flying: set[int] = field(default_factory=set)
    claims: bool = True
    step_s: float = 0.0
    step_tokens: int = 0
    void: bool = False
    over: bool = False


class Meetings:
    """The meetings of one engine. ``busy`` tells whether there is one, decided or going on."""

    def __init__(
        self,
        *,
        block_tokens: int,
        workers: int,
        tally: Tally,
        release: Callable[[int], None],
        save_again: Callable[[RequestState, Request], None],
        clock: Callable[[], float],
    ) -> None:
        """All KV cache groups have blocks of ``block_tokens``: a model with others has no meetings.

        release: gives up a pin.
        save_again: called when blocks of a hit did not come: those from ``state.saved`` on are saved when the
            engine has computed them.
        clock: seconds, monotonic.
        """
        self._block_tokens, self._workers = block_tokens, workers
        self._chunk_min = -(-CHUNK_TOKENS_MIN // block_tokens)
        self._tally, self._release, self._save_again = tally, release, save_again
        self._clock = clock
        self._blocks: BlockPool | None = None
        self.enabled = False  # whether the engine runs the scheduler class
        self._decided: dict[str, tuple[RequestState, Pace]] = {}
        self._meetings: dict[str, Meeting] = {}
        self._pieces: dict[int, Piece] = {}
        self._next_piece = 1
        self._planned: list[Load] = []
        self._moved: list[tuple[Request, int]] = []

    def bind(self, blocks: BlockPool) -> None:
        """The engine's blocks, to hold those that are loaded."""
        self._blocks = blocks

    @property
    def busy(self) -> bool:
        """Whether a request is decided for a meeting, or has one."""
        return bool(self._decided or self._meetings)

    @property
    def under_way(self) -> int:
        """Pieces that some rank is not done with."""
        return len(self._pieces)

    def is_loading(self, request_id: str) -> bool:
        """Whether pieces of the request are under way."""
        meeting = self._meetings.get(request_id)
        return meeting is not None and bool(meeting.flying)

    def frees_soon(self) -> bool:
        """Whether a block is kept by nothing but a piece."""
        return any(block.ref_cnt == 1 for piece in self._pieces.values() for block in piece.blocks)

    # Before and in vLLM's schedule()

    def decide(self, state: RequestState, pace: Pace) -> None:
        """The front of the state's hit is to be computed while its back is loaded."""
        self._decided[state.request_id] = (state, pace)

    def jump(self) -> None:
        """Moves requests whose front has reached loaded blocks behind them."""
        for meeting in list(self._meetings.values()):
            request = meeting.request
            if request.num_preemptions != meeting.preemptions:
                self.drop(request.request_id)
                continue
            if tokens := self._blocks_ahead(meeting) * self._block_tokens:
                request.num_computed_tokens += tokens
                self._moved.append((request, tokens))
                self._tally.add("met_tokens", tokens)
                if meeting.state.preemptions == 0:
                    meeting.state.pool_tokens += tokens
            ended = request.num_computed_tokens >= meeting.end * self._block_tokens
            if ended or not (meeting.claims or meeting.loaded or meeting.flying):
                self.drop(request.request_id)

    def take_moved(self) -> list[tuple[Request, int]]:
        """The requests that were moved since the last call, each with its tokens: also those that were before
        an error, of which the workers must hear."""
        moved, self._moved = self._moved, []
        return moved

    def _blocks_ahead(self, meeting: Meeting) -> int:
        """How many blocks are loaded right at the front, which may use them now."""
        front, rest = divmod(meeting.request.num_computed_tokens, self._block_tokens)
        behind = front
        while not rest and behind in meeting.loaded:
            behind = meeting.loaded.pop(behind)
        return behind - front

    def chunk_tokens(self, request: Request, computed: int, wanted: int) -> int:
        """How many of the ``wanted`` tokens behind ``computed`` ones the next step may compute; 0: it waits
        for a piece that the front has reached."""
        request_id, size = request.request_id, self._block_tokens
        if request_id in self._decided:
            state, pace = self._decided[request_id]
            front = computed // size
            chunk = self._chunk(self._end(state, request) - front, self._ratio(pace))
            return min(wanted, max((front + chunk) * size - computed, 1))
        meeting = self._meetings.get(request_id)
        if meeting is None or request.num_preemptions != meeting.preemptions:
            return wanted
        front = -(-computed // size)
        pieces = (self._pieces[number].first for number in meeting.flying)
        limit = min((first for first in (*pieces, *meeting.loaded) if first >= front), default=None)
        if limit is None:
            return wanted
        chunk = limit - front
        if meeting.claims:
            chunk = self._chunk(chunk, self._ratio(meeting.pace, meeting))
        return max(min(wanted, min(front + chunk, limit) * size - computed), 0)

    def tokens_to_place(self, request: Request) -> int:
        """For so many tokens the engine is to make room in the first step of the request; 0: as ever."""
        decided = self._decided.get(request.request_id)
        return 0 if decided is None else self._end(decided[0], request) * self._block_tokens

    def waits_for_room(self, request: Request) -> bool:
        """Whether the request waits until there is room for its hit: where loading all of it is predicted to
        be faster than computing it."""
        decided = self._decided.get(request.request_id)
        choice = None if decided is None else decided[0].choice
        return choice is not None and choice.load_s < choice.compute_s

    def begin(self, state: RequestState, request: Request, blocks: Blocks) -> bool:
        """Room was made for the request. Returns whether a meeting begins, which then owns the state's
        pin; a hit for which it was decided, and does not begin, is computed."""
        decided = self._decided.pop(state.request_id, None)
        if decided is None or state.hit is None or state.phase is not Phase.HIT:
            return False
        end, block_ids = self._end(state, request), blocks.get_block_ids()
        if min(len(ids) for ids in block_ids) < end:
            self._tally.add(f"load_decisions_{SLOWER}")
            if state.choice is not None:
                self._tally.add("declined_tokens", state.choice.blocks * self._block_tokens)
                state.choice = replace(state.choice, reason=SLOWER, blocks=0, both_s=0.0)
            return False
        self._tally.add(f"load_decisions_{BOTH}")
        hit = state.hit
        state.give_up_pin()
        self.drop(state.request_id)  # of an earlier request of that name
        self._meetings[state.request_id] = Meeting(
            request, state, hit, block_ids, decided[1], request.num_preemptions, end, end
        )
        return True

    # A step

    def plan(self, output: SchedulerOutput) -> Sequence[Load]:
        """The pieces that begin with the step of ``output``. They can be given up until ``told``."""
        for meeting in list(self._meetings.values()):
            if meeting.request.num_preemptions != meeting.preemptions:
                self.drop(meeting.request.request_id)
            elif meeting.claims:
                tokens = output.num_scheduled_tokens.get(meeting.request.request_id, 0)
                self._time_step(meeting, tokens)
                if output.total_num_scheduled_tokens:  # else it may be paused, and that waits for pieces
                    self._claim(meeting, tokens)
        return self._planned

    def told(self) -> None:
        """The step with the planned pieces goes to the workers, which will report their ends."""
        self._planned = []

    def give_up(self) -> None:
        """A step could not be planned: its pieces are not loaded, and no more are claimed."""
        for meeting in self._meetings.values():
            meeting.claims = False
        planned, self._planned = self._planned, []
        for load in planned:
            self._ended(load.piece, PieceEnd(self._workers, 0))

    def stop_all(self) -> None:
        """Nothing is known of the meetings after an error: their requests go on without the pool."""
        for request_id in [*self._decided, *self._meetings]:
            self.stop(request_id)

    def ended(self, ends: Mapping[int, PieceEnd]) -> None:
        """The workers reported the ends of these pieces, each for some ranks."""
        for number, end in ends.items():
            self._ended(number, end)

    def stop(self, request_id: str) -> None:
        """The request goes on without the pool: what was loaded may belong to weights that are gone. It still
        waits for pieces under way, which write to its blocks, and computes all of them."""
        self._decided.pop(request_id, None)
        meeting = self._meetings.get(request_id)
        if meeting is None:
            return
        meeting.claims, meeting.void = False, True
        meeting.loaded.clear()
        if not meeting.flying:
            self.drop(request_id)

    def drop(self, request_id: str) -> None:
        """The request is over, or has lost its blocks; pieces under way keep theirs and the pin."""
        self._decided.pop(request_id, None)
        meeting = self._meetings.pop(request_id, None)
        if meeting is not None:
            meeting.over = True
            if not meeting.flying:
                self._release(meeting.hit.pin_id)

    def disconnected(self) -> None:
        """There is no pool any more, and no pin."""
        for meeting in [*self._meetings.values(), *(piece.meeting for piece in self._pieces.values())]:
            meeting.hit = Hit(0, 0, b"", b"")
        self.stop_all()

    # The parts

    def _end(self, state: RequestState, request: Request) -> int:
        """The block behind the hit's last one that is of use: one token at least is computed."""
        return (
            0 if state.hit is None else min(state.hit.blocks, (request.num_tokens - 1) // self._block_tokens)
        )

    def _ratio(self, pace: Pace, meeting: Meeting | None = None) -> float:
        """Blocks of the meeting, or of one that is decided, that are loaded in the time in which one is
        computed, at ``pace`` and with its part of the link."""
        others = {id(piece.meeting) for piece in self._pieces.values() if piece.meeting is not meeting}
        return pace.ratio / (1 + len(others))

    def _chunk(self, gap: int, ratio: float) -> int:
        """Blocks of the next chunk when so many lie between the front and the back."""
        return max(math.ceil(gap / (1 + ratio) / CHUNKS), self._chunk_min)

    def _time_step(self, meeting: Meeting, tokens: int) -> None:
        """From one plan to the next it is one step, also where the next is planned before the last ended."""
        now_s = self._clock()
        meeting.pace.computed(meeting.step_tokens / self._block_tokens, now_s - meeting.step_s)
        meeting.step_s, meeting.step_tokens = now_s, tokens

    def _claim(self, meeting: Meeting, tokens: int) -> None:
        """tokens: that the step computes of the request."""
        front = -(-(meeting.request.num_computed_tokens + tokens) // self._block_tokens)
        gap = meeting.low - front
        if gap <= 0:
            return
        ratio, chunk = self._ratio(meeting.pace, meeting), tokens / self._block_tokens
        flying = sum(self._pieces[number].last - self._pieces[number].first for number in meeting.flying)
        # With x blocks still to be computed behind this chunk, loads take (x + chunk) * ratio until then.
        rest = max((gap + flying - chunk * ratio) / (1 + ratio), 0.0)
        share = (rest + chunk) * ratio
        ahead = STEPS_AHEAD * max(chunk, self._chunk(gap, ratio)) * ratio
        claimed = min(round(min(share, ahead)) - flying, gap)
        if claimed <= 0 and not flying:
            claimed = 1
        while claimed > 0:
            blocks = claimed if claimed < 4 else claimed // 2
            self._begin_piece(meeting, meeting.low - blocks, meeting.low)
            meeting.low -= blocks
            claimed -= blocks

    def _begin_piece(self, meeting: Meeting, first: int, last: int) -> None:
        assert self._blocks is not None
        number, self._next_piece = self._next_piece, self._next_piece + 1
        ids = by_part(meeting.block_ids, (), first, last)
        blocks = [self._blocks.blocks[block_id] for part in ids for block_id in part]
        width = meeting.state.chain.width
        unit = DESCRIPTOR_BYTES * width
        load = Load(
            request_id=meeting.request.request_id,
            width=width,
            first_names=meeting.state.chain.names(first, first + 1),
            holders=meeting.hit.holders,
            descriptors=meeting.hit.descriptors[first * unit : last * unit],
            block_ids=ids,
            piece=number,
        )
        self._blocks.touch(blocks)
        self._pieces[number] = Piece(meeting, first, last, blocks, self._workers, last - first)
        meeting.flying.add(number)
        self._planned.append(load)

    def _ended(self, number: int, end: PieceEnd) -> None:
        piece = self._pieces.get(number)
        if piece is None:
            return
        piece.ranks -= end.ranks
        piece.good = min(piece.good, end.good)
        piece.seconds = max(piece.seconds, end.took.seconds if end.took is not None else 0.0)
        if piece.ranks > 0:
            return
        assert self._blocks is not None
        del self._pieces[number]
        self._blocks.free_blocks(reversed(piece.blocks))
        meeting, count = piece.meeting, piece.last - piece.first
        meeting.flying.discard(number)
        self._tally.add("loads")
        self._tally.add("loaded_tokens", piece.good * self._block_tokens)
        self._tally.add("load_errors", count - piece.good)
        if meeting.over or meeting.void:
            if meeting.flying:
                return
            if meeting.over:
                self._release(meeting.hit.pin_id)
            else:
                self.drop(meeting.request.request_id)
            return
        if piece.good:
            meeting.loaded[piece.first] = piece.first + piece.good
        if piece.good == count:
            meeting.pace.loaded(count, piece.seconds)
        else:
            self._failed(meeting, piece)

    def _failed(self, meeting: Meeting, piece: Piece) -> None:
        """The front computes what did not come; what lies below is not loaded any more."""
        meeting.claims = False
        state = meeting.state
        if state.preemptions == 0:
            state.load_errors += piece.last - piece.first - piece.good
        state.saved = min(state.saved, piece.first + piece.good)
        state.block_ids = [list(ids) for ids in meeting.block_ids]
        self._save_again(state, meeting.request)
