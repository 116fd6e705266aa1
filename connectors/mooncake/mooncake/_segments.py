"""More memory for the pool from this process: each segment is a node of its own."""

from __future__ import annotations

import os
import secrets
from dataclasses import replace
from typing import Any

from moonpool.core.errors import Error, InvalidArgument

from . import _access
from ._access import Guest, OwnNode, own_node
from ._base import Base
from ._codes import Code, Unsupported, code_of, coded
from ._memory import number

_NOTHING: dict[str, Any] = {"segment_ids": [], "allocated_size": 0}


class Segments(Base):
    """Memory that this process lends to the pool after setup()."""

    def __init__(self) -> None:
        super().__init__()
        self._mounted: dict[str, OwnNode] = {}

    def allocate_and_mount_segment(
        self, size: int, protocol: str = "tcp", location: str = ""
    ) -> dict[str, Any]:
        """``ret``, the ids of what was added, and its bytes. protocol and location are moonpool's choice."""
        try:
            access = self._open()
            if not isinstance(access, (OwnNode, Guest)) or number(size) == 0:
                raise InvalidArgument("a segment has bytes, and a dummy client has none")
            node = own_node(replace(access.settings.at_port(0), segment=size, ssd_path=""))
            try:
                node.join(_access.JOIN_TIMEOUT_S)
            except BaseException:
                node.close()
                raise
        except (Error, OSError, MemoryError) as error:
            return {"ret": int(code_of(error, "allocate_and_mount_segment")), **_NOTHING}
        name = f"{secrets.randbits(63)}-{secrets.randbits(63)}"
        self._mounted[name] = node
        return {"ret": int(Code.OK), "segment_ids": [name], "allocated_size": size}

    def mount_segment(
        self, path: str, size: int, offset: int = 0, protocol: str = "tcp", location: str = ""
    ) -> dict[str, Any]:
        """Refused: an arena is memory of its node's own and no given file."""
        if not os.path.exists(path):
            error: Exception = FileNotFoundError(f"{path} is not there")
        else:
            error = Unsupported(
                f"{path} was not mounted: moonpool's arenas are memory of their own; "
                f"allocate_and_mount_segment({size}) adds as much"
            )
        return {"ret": int(code_of(error, "mount_segment")), "segment_ids": []}

    @coded("unmount_segment")
    def unmount_segment(self, segment_ids: list[str], grace_period_seconds: int = 0) -> int:
        """Ends those nodes at once; what only they held is a miss from then on."""
        self._open()
        if unknown := [one for one in segment_ids if one not in self._mounted]:
            raise InvalidArgument(f"this store mounted no segment {', '.join(unknown)}")
        for one in segment_ids:
            self._mounted.pop(one).close()
        return int(Code.OK)

    def unmount_and_free_segment(self, segment_ids: list[str], grace_period_seconds: int = 0) -> int:
        """As unmount_segment."""
        return self.unmount_segment(segment_ids, grace_period_seconds)

    @coded("unmount_local_disk_segment")
    def unmount_local_disk_segment(self, grace_period_seconds: int = 0) -> int:
        """Refused where there is an SSD: a node keeps it for its life."""
        access = self._open()
        if isinstance(access, OwnNode) and access.settings.ssd_path:
            raise Unsupported("a node keeps its SSD for as long as it runs; close() this store")
        return int(Code.OK)

    @coded("get_offload_rpc_read_count")
    def get_offload_rpc_read_count(self) -> int:
        """Objects that this process's node read from its SSD."""
        access = self._open()
        metrics = access.server.metrics() if isinstance(access, OwnNode) else {}
        return int(metrics.get("ssd_read_objects_total", 0))
