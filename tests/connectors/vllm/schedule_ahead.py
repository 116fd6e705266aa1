"""Makes vLLM on a CPU plan a step while the last one is not over, as it does on a card. Its workers end a
step before they begin the next one, as ever."""

from __future__ import annotations

import functools
from typing import Any


def schedule_ahead() -> None:
    """For all engines of this process that are made from here on."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    check = CpuPlatform.check_and_update_config.__func__

    def ahead(cls: Any, vllm_config: Any) -> None:
        check(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(ahead)
    init = CPUModelRunner.__init__

    @functools.wraps(init)
    def not_ahead(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        vllm_config.scheduler_config.async_scheduling = False
        try:
            init(self, vllm_config, *args, **kwargs)
        finally:
            vllm_config.scheduler_config.async_scheduling = True

    CPUModelRunner.__init__ = not_ahead
