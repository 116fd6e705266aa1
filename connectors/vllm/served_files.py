"""Which files the weights of a worker are loaded from while it serves, so that they have a name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moonpool.connectors import weights
from moonpool.connectors.files import File
from moonpool.connectors.vllm.weight_changes import Change
from moonpool.core.errors import Error


class ServedFiles:
    """Of one worker. ``replaced``: whether its weights are not those of the engine's start."""

    def __init__(self, model_config: Any) -> None:
        """model_config: vLLM's, which notes the path of what was loaded last."""
        self._model_config = model_config
        self._files: tuple[File, ...] = ()  # that the engine is loading
        self.replaced = False

    def changing(self, change: Change) -> None:
        """The weights are about to be replaced: looks at the files that they come from, if they do."""
        self._files = ()
        if change.from_files:
            try:
                self._files = weights.settled_files(Path(change.path or self._model_config.model))
            except Error:  # no local path
                return

    def loaded(self, path: str) -> bool:
        """The worker has loaded the weights of ``path``. Whether these are the files that were looked at."""
        known = bool(self._files) and str(self._model_config.model) == path
        if known:
            self.replaced = True
            weights.loaded(Path(path), self._files)
        return known
