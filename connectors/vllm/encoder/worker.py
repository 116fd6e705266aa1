"""The half beside the encoder: loads outputs into vLLM's cache before the step computes, and saves what the
encoder has computed.

vLLM leaves to this half what the scheduler's half has found, and ends when it is not there: so what cannot be
loaded, for whatever reason, is given back to vLLM's plan of the same step, and the encoder computes it. All
ranks decide the same.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import numpy as np

from moonpool.connectors.vllm.encoder.membership import Membership
from moonpool.connectors.vllm.encoder.messages import EncoderReport, EncoderStep, Load, Output
from moonpool.connectors.vllm.encoder.objects import HEADER_BYTES, NoOutput, Shape, header, shape_of
from moonpool.connectors.vllm.metrics import Tally
from moonpool.connectors.vllm.pool import TIMEOUT_S, Pool, Ticket
from moonpool.connectors.vllm.repeats import Repeats, times
from moonpool.connectors.vllm.weight_changes import UNKNOWN, Change
from moonpool.core.errors import Error

LOAD_TIMEOUT_S = 1.0  # of all loads of a step together

Cache = MutableMapping[str, Any]  # vLLM's: identifier -> tensor
Agreed = Callable[[Sequence[bool]], list[bool]]


class WorkerHalf:
    """The half beside the encoder; all methods run on the worker's thread."""

    def __init__(
        self,
        membership: Membership,
        *,
        dtype: Any,
        unit: int,
        save_bytes: int,
        is_saver: Callable[[], bool],
        agreed: Agreed,
        device: Callable[[], Any],
        log: logging.Logger,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """membership: of this half in the pool.
        dtype: torch's type of the numbers of an output.
        unit: numbers of one embedding of the language model.
        save_bytes: of outputs that may wait to be stored.
        is_saver: whether this rank saves, of an engine whose role it is.
        agreed: which of its flags are set on all ranks.
        device: where vLLM has its outputs.
        """
        self.membership = membership
        self._dtype, self._type = dtype, str(dtype).removeprefix("torch.")
        self._unit = unit
        self._save_bytes = save_bytes
        self._is_saver, self._agreed, self._device = is_saver, agreed, device
        self._log = log
        self._clock = clock
        self._repeats = Repeats(clock)
        self._widths: dict[str, int] = {}  # modality -> numbers of a row, as this worker's encoder gives them
        # ticket -> the memory that is being stored, its bytes, and since when
        self._saving: dict[Ticket, tuple[Any, int, float]] = {}
        self._loading: dict[Ticket, Output] = {}  # of this step
        self._answers: list[tuple[Output, Any]] = []  # of these loads
        self._late: set[Ticket] = set()  # loads of earlier steps that are unanswered
        self._late_s = 0.0  # when the last of them was answered, or had been waited for
        self._waiting_bytes = 0
        self._report = EncoderReport()
        self._returns = False  # whether the fingerprint of new weights is still to be reported
        self.armed = False  # whether the engine's model has its first weights
        self.whole = False  # whether the last load into the model gave it each parameter
        self.tally = Tally()

    # A step

    def fetch(self, loads: Sequence[Load], cache: Cache) -> None:
        """Loads what the pool has now into vLLM's cache. Waits at most LOAD_TIMEOUT_S, and not at all while
        loads of an earlier step, behind which these would stand, are unanswered."""
        pool = self.membership.pool()
        if pool is None:
            return
        self._poll(pool)
        if self._stalls():
            return
        began_s = self._clock()
        for load in loads:
            output = load.output
            if output.identifier not in cache and output.name:
                try:
                    self._loading[pool.submit_view(output.name)] = output
                except Error as error:
                    self._complain(output, str(error))
        try:
            while self._loading:
                self._poll(pool)
                while self._answers:
                    self._take(*self._answers.pop(), cache)
                left_s = LOAD_TIMEOUT_S - (self._clock() - began_s)
                if self._loading and (left_s <= 0 or not pool.wait_for_read(left_s)):
                    break
        finally:
            self._answers.clear()
            late, self._loading = self._loading, {}
            self._late.update(late)
            self._late_s = self._clock()
        if late:
            self._report.stalled = True
        for output in late.values():
            self._complain(output, f"no answer within {LOAD_TIMEOUT_S:g} s")
        self.tally.observe("load_seconds", self._clock() - began_s)

    def _stalls(self) -> bool:
        """Whether loads of an earlier step are unanswered. The pool answers each within TIMEOUT_S of the one
        before; if it does not, they count no more."""
        if self._late and self._clock() - self._late_s >= TIMEOUT_S:
            self._late.clear()
        return bool(self._late)

    def settle(self, step: EncoderStep, cache: Cache) -> None:
        """Gives what some rank could not load back to vLLM, which computes it in this step."""
        have = self._agreed([load.output.identifier in cache for load in step.loads])
        for load, there in zip(step.loads, have, strict=True):
            if there:
                continue
            self.tally.add("load_errors")
            cache.pop(load.output.identifier, None)
            if load.request_id not in step.preempted:
                assert step.encoded is not None
                step.computed[load.output.identifier] = load.output
                step.encoded.setdefault(load.request_id, []).append(load.index)

    def computed(self, step: EncoderStep, cache: Cache, identifier: str) -> None:
        """The encoder has computed an output of the step's plan: hands it to a native thread to store it."""
        output, tensor = step.computed[identifier], cache[identifier].detach()
        if tensor.dim() == 2:
            self._widths.setdefault(output.modality, int(tensor.shape[1]))
        pool = self.membership.pool() if output.name else None
        if pool is None or not self._is_saver():
            return
        self._poll(pool)
        if tensor.dim() != 2 or tensor.dtype != self._dtype or tensor.shape[0] != output.rows:
            self._leave_out(
                f"the encoder gave {tuple(tensor.shape)} of {tensor.dtype}, not {output.rows} rows"
            )
            return
        size = tensor.numel() * tensor.element_size()
        if self._waiting_bytes + size > self._save_bytes:
            self._leave_out(
                f"{self._waiting_bytes} bytes wait to be stored; save_bytes is {self._save_bytes}"
            )
            return
        # vLLM does not write into an output, so on a CPU it is stored from where it is.
        memory = tensor.to("cpu").contiguous()
        shape = Shape(self._type, output.rows, int(memory.shape[1]), memory.element_size())
        try:
            ticket = pool.submit_put(output.name, [header(output.name, shape), (memory.data_ptr(), size)])
        except Error:
            self.tally.add("refused")
            return
        self._saving[ticket] = memory, size, self._clock()
        self._waiting_bytes += size

    def take_report(self) -> EncoderReport | None:
        """What the scheduler's half is to know of the step."""
        if self._returns:
            self._came_back()
        # An answer that comes late pins its object until it is taken in.
        if (self._saving or self._late) and (pool := self.membership.pool()) is not None:
            self._poll(pool)
        if not self.tally and self._report == EncoderReport():
            return None
        report, self._report = self._report, EncoderReport()
        stats = self.tally.take()
        report.counts = stats.data if stats is not None else {}
        return report

    # Weights that are replaced

    def leave(self, change: Change) -> None:
        """The weights are about to be replaced. Returns when nothing is stored under the old fingerprint any
        more; outputs that were computed with them are not stored later."""
        self._log.debug("moonpool: this worker stores no more encoder outputs: %s", change.how)
        self.whole = self._returns = False
        self._report = EncoderReport()
        self.membership.leave()
        self._saving.clear()  # their threads have ended
        self._late.clear()
        self._waiting_bytes = 0

    def leave_unannounced(self) -> None:
        """As ``leave``, for weights that the model is given without a call of the engine. The first weights
        of a model are no change."""
        if self.armed and not self.membership.refusal:
            was_there = bool(self.membership.fingerprint)
            change = Change("weights were given to its model")
            self.leave(change)
            self._report.left = True
            if was_there:
                self._log.warning(
                    "moonpool: encoder outputs are not shared from here on: %s", change.sentence
                )

    def come_back(self, *, known: bool) -> None:
        """The engine has loaded weights from files: joins the pool again, later where they have to be read.

        known: whether they have a name.
        """
        if self.membership.refusal:
            return
        if not (known and self.whole):
            self._log.warning("moonpool: encoder outputs are not shared: %s", UNKNOWN.sentence)
            return
        self._returns = True
        self.membership.come_back()
        if not self.membership.refusal and not self.membership.fingerprint:
            self._log.info(
                "moonpool: the new weights are being read; encoder outputs are shared from then on"
            )

    def _came_back(self) -> None:
        """Reports the fingerprint of the new weights, once they are known."""
        self.membership.pool()
        self._returns = not (self.membership.refusal or self.membership.fingerprint)
        if self.membership.refusal:
            self._log.warning("moonpool: encoder outputs are not shared: %s", self.membership.refusal)
        elif self.membership.fingerprint:
            self._report = EncoderReport(fingerprints=[self.membership.fingerprint])

    def close(self) -> None:
        """Returns when all saves have ended."""
        self.membership.close()
        self._saving.clear()

    def _poll(self, pool: Pool) -> None:
        """Takes in answers: of loads for ``fetch``, of saves for the counts. Those of loads that nothing
        waits for are dropped."""
        for ticket, answer in pool.poll():
            saving = self._saving.pop(ticket, None)
            if saving is None:
                if ticket in self._loading:
                    self._answers.append((self._loading.pop(ticket), answer))
                elif ticket in self._late:
                    self._late.discard(ticket)
                    self._late_s = self._clock()
                continue
            _, size, since_s = saving
            self._waiting_bytes -= size
            self.tally.observe("save_seconds", self._clock() - since_s)
            outcome = 2 if isinstance(answer, Exception) else answer[0][0]  # as put_results has them
            self.tally.add(("saves", "existing", "refused")[min(outcome, 2)])
            if outcome == 0:
                self.tally.add("saved_bytes", size)

    def _take(self, output: Output, answer: Any, cache: Cache) -> None:
        """Puts an output into vLLM's cache, if it is the right one."""
        if isinstance(answer, Exception):
            self._complain(output, str(answer))
            return
        (view,) = answer
        if view is None:
            self._complain(output, "it is gone")
            return
        try:
            tensor = self._read(output, view)
        except NoOutput as why:
            self._complain(output, str(why))
            return
        cache[output.identifier] = tensor
        self.tally.add("loads")
        self.tally.add("loaded_bytes", tensor.numel() * tensor.element_size())

    def _read(self, output: Output, view: memoryview) -> Any:
        """The tensor, on the device. Raises NoOutput."""
        shape = shape_of(
            view,
            output.name,
            dtype=self._type,
            item_bytes=self._dtype.itemsize,
            rows=output.rows,
            unit=self._unit,
            width=self._widths.get(output.modality),
        )
        import torch

        tensor = torch.empty((shape.rows, shape.width), dtype=self._dtype)
        tensor.view(torch.uint8).reshape(-1).numpy()[:] = np.frombuffer(view, np.uint8)[HEADER_BYTES:]
        return tensor.to(self._device())

    def _complain(self, output: Output, why: str) -> None:
        if count := self._repeats.due("load"):
            self._log.warning(
                "moonpool: an encoder output of %d embeddings could not be loaded and is computed: %s%s",
                *(output.rows, why, times(count)),
            )

    def _leave_out(self, why: str) -> None:
        self.tally.add("unsaved")
        if count := self._repeats.due("save"):
            self._log.warning("moonpool: an encoder output is not stored: %s%s", why, times(count))
