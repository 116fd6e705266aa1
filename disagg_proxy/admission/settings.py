"""Which objectives requests are admitted by, and how many of them may wait. Values only; times in seconds."""

from __future__ import annotations

from moonpool.core.config.proxy_section import Admission
from moonpool.disagg_proxy.conductor.admission import Objective
from moonpool.disagg_proxy.setting_error import bad


class AdmissionSettings(Admission, frozen=True, kw_only=True):
    """ttft_slo, gap_slo: to a request's first token, and between two tokens of its answer; 0: any. queue_max:
    so many requests may wait here, each up to ``queue_deadline``; 0: what cannot be taken is refused at once.
    """

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise bad(name, f"{name} is 0 or more, not {value}")
        if self.queue_max and not self.queue_deadline:
            raise bad("queue_deadline", "who may wait needs some time for it: a positive queue_deadline")

    @property
    def any(self) -> bool:
        """Whether a request can be refused or made to wait at all. Without, the dispatcher makes no
        ``Admission``."""
        return bool(self.ttft_slo or self.gap_slo or self.queue_max)

    @property
    def objective(self) -> Objective:
        """The two objectives, with infinity where the setting is 0."""
        any_s = float("inf")
        return Objective(self.ttft_slo or any_s, self.gap_slo or any_s)
