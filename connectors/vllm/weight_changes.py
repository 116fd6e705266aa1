"""Weights that are replaced while an engine serves (reinforcement learning, a new checkpoint): its KV is then
another model's, under the old fingerprint. vLLM tells no connector of it.

So compat.watch_weights looks at each call that an engine gives to its workers, before the workers get it, and
asks here whether the call may change weights. If it may, the workers leave the pool before the change:

    all weights come from the files of a local path   the workers join again, under a fingerprint of these
    anything else (a trainer's weights, sleep level   the weights have no name: the engine serves without the
    2, code of the user)                              pool until such a load

A call that this module does not know counts as a change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Methods of vLLM's workers that leave the weights as they are.
_HARMLESS = frozenset(
    (
        *("add_lora", "remove_lora", "pin_lora", "profile", "wake_up", "update_config", "synchronize_device"),
        *("reset_mm_cache", "reset_encoder_cache", "execute_dummy_batch", "save_sharded_state"),
        *("save_tensorized_model", "init_weight_transfer_engine", "shutdown_weight_transfer_engine"),
        *("checkpoint_prepare", "checkpoint_restore", "release_late_interaction_query_cache"),
    )
)
_READS = ("get_", "is_", "list_", "check_", "compute_", "supports_")
RELOAD, SLEEP = "reload_weights", "sleep"
LOST_AT = 2  # the level of sleep from which on the weights are not kept


@dataclass(frozen=True, slots=True)
class Change:
    """A change of weights that is about to happen.

    how: what the engine was told, for the log.
    from_files: whether the weights come from the files of a path.
    path: that path; "": the model's own.
    """

    how: str
    from_files: bool = False
    path: str = ""

    @property
    def sentence(self) -> str:
        """Why the engine serves without the pool from here on."""
        return (
            f"its weights were replaced while it ran ({self.how}), and their KV has no name in the pool; "
            f"load them from a local path with {RELOAD}, or start the engine again with them"
        )


UNKNOWN = Change("it does not tell from where, or whether all of them")


def change_by(method: object, args: Sequence[object], kwargs: Mapping[str, object]) -> Change | None:
    """The change of weights that a call of this method of all workers makes or may make; None: none."""
    if not isinstance(method, str):
        return Change(getattr(method, "__name__", "a function of the user"))
    if method == SLEEP:
        level = kwargs.get("level", args[0] if args else 1)
        return sleep_change(level)
    if method == RELOAD:
        given = dict(zip(("weights_iterator", "weights_path", "is_checkpoint_format"), args, strict=False))
        given |= kwargs
        path = given.get("weights_path")
        from_files = given.get("weights_iterator") is None and given.get("is_checkpoint_format", True) is True
        return Change(RELOAD, from_files, "" if path is None else str(path))
    if method in _HARMLESS or method.startswith(_READS):
        return None
    return Change(method)


def sleep_change(level: object) -> Change | None:
    """The change that this level of sleep makes."""
    lost = not isinstance(level, int) or level >= LOST_AT
    return Change(f"sleep level {level}") if lost else None
