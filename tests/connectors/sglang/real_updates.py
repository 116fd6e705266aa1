"""Run by a Python with SGLang: its own class that replaces weights, watched; and what is in its page keys."""

from __future__ import annotations

import contextlib
import importlib

from moonpool.connectors.objects import Refused
from moonpool.connectors.sglang import compat, updates

CALLED_BY_THE_SCHEDULER = {  # in 0.5.18, in 0.5.23, or in both
    "update_weights_from_disk",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
    "update_weights_from_distributed",
    "receive_weights_from_distributed",
    "load_weights_from_distributed",
    "begin_weight_update",
}


class Follower:
    left = 0

    def weights_replaced(self) -> None:
        self.left += 1


def main() -> None:
    updater = compat.weight_updater()
    assert updater is not None
    assert updater is getattr(importlib.import_module(updates.MODULE), updates.CLASS)
    updates.watch(updater)
    names = CALLED_BY_THE_SCHEDULER & vars(updater).keys()
    assert len(names) >= 4, names
    for name in sorted(names):
        updates._replaced = False
        follower = Follower()
        updates.follow(follower)
        with contextlib.suppress(Exception):  # there is no model: that shows behind our part
            getattr(object.__new__(updater), name)(*[None] * 5)
        assert follower.left == 1, name
        try:
            updates.follow(follower)
        except Refused:
            continue
        raise AssertionError("joined the pool with weights that nobody knows")
    version = importlib.import_module("sglang").__version__
    print(
        f"{version}: {len(names)} methods are watched; keys have namespaces: {compat.keys_have_namespaces()}"
    )


if __name__ == "__main__":
    main()
