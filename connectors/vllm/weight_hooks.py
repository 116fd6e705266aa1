"""What compat.watch_weights and compat.watch_model call on a connector, of the scheduler or of a worker, when
weights are replaced: the same for KV and for encoder outputs."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Protocol

from moonpool.connectors.objects import Refused
from moonpool.connectors.vllm.guard import Guard
from moonpool.connectors.vllm.served_files import ServedFiles
from moonpool.connectors.vllm.weight_changes import Change
from moonpool.core.errors import Error
from moonpool.core.store import keys


class SchedulerLeaves(Protocol):
    """The part of a scheduler's half that hears of changes."""

    def weights_changing(self, change: Change) -> None:
        """The engine is about to replace its weights."""

    def workers_left(self) -> None:
        """All workers have left the pool."""


class WorkerLeaves(Protocol):
    """The part of a worker's half that hears of changes. ``whole``: whether the last load into the model gave
    it each parameter."""

    whole: bool

    def leave(self, change: Change) -> None:
        """The weights are about to be replaced. Returns when nothing is stored under the old name."""

    def leave_unannounced(self) -> None:
        """As ``leave``, for a change that the scheduler's half does not know."""

    def come_back(self, *, known: bool) -> None:
        """The engine has loaded weights from files. known: whether they have a name."""


class WeightHooks:
    """The hooks of a connector that has one of the two halves. None of them raises."""

    _sched: SchedulerLeaves | None
    _worker: WorkerLeaves | None
    _guard: Guard
    _served_files: ServedFiles

    def weights_changing(self, change: Change) -> None:
        """The engine is about to replace its weights."""
        if self._sched is not None:
            self._guard(None, self._sched.weights_changing, change)
        elif self._worker is not None:
            self._guard(None, self._worker.leave, change)
            self._guard(None, self._served_files.changing, change)

    def workers_left(self) -> None:
        """All workers have left the pool."""
        if self._sched is not None:
            self._guard(None, self._sched.workers_left)

    def weights_are_files(self, path: str) -> None:
        """This worker has loaded the weights of this path."""
        if self._worker is None:
            return
        known = self._guard(False, self._served_files.loaded, path)
        self._guard(None, functools.partial(self._worker.come_back, known=known))

    def model_loading(self) -> None:
        """This worker's model is about to be given weights."""
        if self._worker is not None:
            self._guard(None, self._worker.leave_unannounced)

    def model_loaded(self, *, whole: bool) -> None:
        """This worker's model was given weights.

        whole: whether each of its parameters was.
        """
        if self._worker is not None:
            self._worker.whole = whole


def fingerprint_of(
    read: Callable[[], dict[str, keys.Json]],
    served_files: ServedFiles,
    *,
    subject: str,
    guard: Guard,
    log: logging.Logger,
) -> bytes:
    """The fingerprint of the fields that ``read`` returns, of the weights that are served now. Raises
    Pending, Refused or Error.

    subject: what depends on them, and how, for the sentence of a refusal: "its KV depends".
    """
    try:
        fields = read()
        if served_files.replaced:  # a load into a live engine need not do what its start does
            fields["revision"] = f"{fields['revision']} loaded while serving"
        mark = keys.fingerprint(fields)
    except (Refused, Error):
        raise
    except Exception as error:  # a configuration that this connector does not understand
        guard.survive(None)
        raise Refused(
            f"what {subject} on cannot be read from its configuration ({type(error).__name__})"
        ) from error
    log.debug("moonpool: the fingerprint is of %s", fields)
    return mark
