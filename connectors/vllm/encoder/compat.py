"""Every difference between the vLLM versions in their connectors of encoder outputs, and what these tell of
their engine.

0.26 to 0.32 call the same hooks of the scheduler's half. A worker's half reports from 0.30 on, and there are
metrics from 0.31 on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from moonpool.connectors.vllm.standins import or_standins

if TYPE_CHECKING:
    from moonpool.connectors.vllm import standins as base
else:
    base = or_standins("vllm.distributed.ec_transfer.ec_connector.base")

ConnectorBase = base.ECConnectorBase
ConnectorRole = base.ECConnectorRole
Metadata = base.ECConnectorMetadata
WorkerMetadata: Any = getattr(base, "ECConnectorWorkerMetadata", object)


def can_fail_requests() -> bool:
    """Whether vLLM asks for requests whose items cannot be had (0.30+)."""
    return hasattr(ConnectorBase, "take_unavailable_requests")


def embedding_width(model: Any) -> int:
    """Numbers of one embedding of the language model; an encoder's output has one or more of that.

    model: vLLM's ModelConfig.
    """
    width = getattr(model, "get_inputs_embeds_size", None) or model.get_hidden_size
    return int(width())


def model_class(model: Any) -> str:
    """The class of vLLM's that runs the model, which need not be the one that its config names.

    model: vLLM's ModelConfig.
    """
    return str(model.architecture)


def is_saver() -> bool:
    """Whether this worker saves: the first tensor-parallel rank; every rank has the same outputs."""
    from vllm.distributed.parallel_state import get_tp_group

    return int(get_tp_group().rank_in_group) == 0


def device() -> Any:
    """Where this worker's encoder outputs are."""
    import torch
    from vllm.platforms import current_platform

    kind = str(current_platform.device_type)
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device(kind, torch.accelerator.current_device_index())


def agreed(flags: Sequence[bool]) -> list[bool]:
    """Which flags are set on all tensor-parallel ranks of this stage. All of them call it, with equally many
    flags, because an encoder that is spread over ranks runs on all or on none."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return list(flags)
    import torch

    shared = torch.tensor([int(flag) for flag in flags], dtype=torch.uint8)
    torch.distributed.all_reduce(shared, torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return [bool(flag) for flag in shared.tolist()]
