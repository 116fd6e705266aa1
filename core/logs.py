"""What a process of ours logs, to standard error: the setting log.level, read once at its start."""

from __future__ import annotations

import logging

from moonpool.core.config import Config

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def set_up(config: Config) -> None:
    """For the programs of Moonpool; a library inside somebody else's process leaves logging to that one."""
    logging.basicConfig(level=config.log.level.upper(), format=FORMAT, force=True)
