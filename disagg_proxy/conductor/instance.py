"""The conductor's account of one engine: its role, its books, and the cost models learnt from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from itertools import islice
from statistics import fmean

from moonpool._native import Books, DecodeModel, HandoverModel, PrefillModel, Standing
from moonpool.disagg_proxy.conductor.calibration import Ratios
from moonpool.disagg_proxy.conductor.flow import Flow
from moonpool.disagg_proxy.conductor.sender import Sender

SISTERS_MAX = 32  # so many know what a thousand do
LEARNT = 16  # samples, from which on what was learnt is better than the prior
_MODELS = ("prefill_model", "handover_model", "decode_model")


class Role(Enum):
    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


class Instance(Standing):
    """What policies weigh is in C++ (``Standing``), where a thousand instances can be weighed at once.

    place: stable position among all engines. known_as, site: its name for other proxies, and where it is.
    room_tokens: what its KV cache holds; 0: not known. load: says how many requests are there, where the
    relay counts them better than the books. alone: it can answer without another's prefill, or, a prefill
    engine, by itself. coming, coming_tokens: requests, and tokens of their prompts, that others prefill for
    it. obeys: it computes what it is told not to fetch; others fetch whatever the pool holds.

    ttft_ratios: how well its first tokens are predicted. flow: what comes to it. sender: what others fetch
    from it. sisters_compute: what it is thought to take for a prompt is what others of its kind have taken.
    turn: when a policy last chose it, by the policy's own count.
    """

    __slots__ = (
        "alone",
        "books",
        "decode_model",
        "flow",
        "handover_model",
        "known_as",
        "load",
        "name",
        "place",
        "prefill_model",
        "role",
        "sender",
        "sisters_compute",
        "site",
        "ttft_ratios",
    )

    def __init__(
        self,
        place: int,
        name: str,
        role: Role = Role.BOTH,
        *,
        room_tokens: int = 0,
        load: Callable[[], int] | None = None,
        known_as: str = "",
        site: str = "",
    ) -> None:
        books, prefill_model, decode_model = Books(), PrefillModel(), DecodeModel()
        super().__init__(place, room_tokens, books, prefill_model, decode_model)
        self.place = place
        self.name = name
        self.known_as = known_as or name
        self.site = site
        self.role = role
        self.alone = True
        self.load = load
        self.books = books
        self.ttft_ratios = Ratios()
        self.flow = Flow()
        self.sender = Sender()
        self.prefill_model = prefill_model
        self.handover_model = HandoverModel()
        self.decode_model = decode_model
        self.sisters_compute = False

    @property
    def in_flight(self) -> int:
        return self.books.requests if self.load is None else self.load()

    def learn_from(self, sisters: Iterable[Instance]) -> None:
        """It is new, and they are what it is: the first guess at its times is the mean of what they have
        learnt, where they have; it weighs as a prior. What it has learnt itself is kept."""
        looked_at = list(islice(sisters, SISTERS_MAX))
        for name in _MODELS:
            theirs = [getattr(sister, name).regression for sister in looked_at]
            known = [each.coefficients for each in theirs if each.samples >= LEARNT]
            if known:
                getattr(self, name).regression.start([fmean(values) for values in zip(*known, strict=True)])
                self.sisters_compute |= name == "prefill_model"

    def guess_from(self, giver: Instance) -> None:
        """That computes prompts for this one. Until it, or one of its kind, has computed some itself it is
        taken to be no faster."""
        theirs, mine = giver.prefill_model.regression, self.prefill_model.regression
        if theirs.samples >= LEARNT and not mine.samples and not self.sisters_compute:
            mine.start(theirs.coefficients)

    def teach(self, sisters: Sequence[Instance]) -> None:
        """Those that have not been observed yet are first taken to be as this one has turned out to be: it
        would be preferred for ever to what is thought slow, and is not seen."""
        for name in _MODELS:
            mine = getattr(self, name).regression
            if mine.samples < LEARNT:
                continue
            for sister in sisters:
                theirs = getattr(sister, name).regression
                if not theirs.samples:
                    theirs.start(mine.coefficients)
                    sister.sisters_compute |= name == "prefill_model"

    def check_integrity(self) -> None:
        self.books.check_integrity()
        for name in _MODELS:
            getattr(self, name).regression.check_integrity()


def answering(instances: Sequence[Instance]) -> Sequence[Instance]:
    """Those that decode; all, where none does."""
    return [each for each in instances if each.role is not Role.PREFILL] or instances
