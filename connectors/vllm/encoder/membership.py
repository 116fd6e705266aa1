"""The pool under the fingerprint of an encoder. A half joins it when the weights are known, which may be
after the engine serves, and leaves it when they are replaced.

    reading -> joined -> left -> joined ...
          \\-> refused
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from moonpool.connectors.files import Reading
from moonpool.connectors.node_connection import NodeConnection
from moonpool.connectors.objects import Refused
from moonpool.connectors.vllm.pool import Pool
from moonpool.connectors.weights import Pending
from moonpool.core.errors import Error

OpenNode = Callable[[bytes], NodeConnection[Pool]]


class Membership:
    """One half's place in the pool; all methods run on its engine's thread."""

    def __init__(
        self,
        *,
        fingerprint: Callable[[], bytes],
        open_node: OpenNode,
        log: logging.Logger,
        refusal: str = "",
        quiet: bool = False,
    ) -> None:
        """fingerprint: of the encoder, 32 bytes; raises Pending while the weights are being read, and Refused
            or Error when they cannot be identified.
        open_node: connects to the node under a fingerprint.
        refusal: why this engine never joins; "": it may.
        quiet: whether joining is logged for debugging only, because another half says the same.
        """
        self._ask = fingerprint
        self._open_node = open_node
        self._log, self._quiet = log, quiet
        self._node: NodeConnection[Pool] | None = None
        self._reading: Reading | None = None
        self._left = False
        self.refusal = refusal
        self.fingerprint = b""

    def pool(self) -> Pool | None:
        """The pool, if there is one now. Joins when the weights have become known."""
        if self._node is None and not self._may_join():
            return None
        return None if self._node is None else self._node.client

    def join(self, fingerprint: bytes | None = None) -> None:
        """Joins, again after ``leave``. Raises what the callables raise.

        fingerprint: None: of this engine's weights as they are now.
        """
        self.leave()
        self.fingerprint = self._ask() if fingerprint is None else fingerprint
        self._node = self._open_node(self.fingerprint)
        self._left = False
        log = self._log.debug if self._quiet else self._log.info
        log("moonpool: encoder outputs, fingerprint %s", self.fingerprint.hex()[:16])

    def leave(self) -> None:
        """Ends the operations under way; ``pool`` is None until ``join``."""
        node, self._node, self._left, self.fingerprint = self._node, None, True, b""
        if node is not None:
            node.close()

    close = leave

    def come_back(self) -> None:
        """Joins again, under the weights as they are now: at once or, while they are being read, with a later
        ``pool``. Refuses for good where they cannot be identified."""
        self.leave()
        self._left, self._reading = False, None
        self._may_join()

    def refuse(self, why: str) -> None:
        """This engine never joins from here on; says so once."""
        self.leave()
        self.refusal = why
        log = self._log.debug if self._quiet else self._log.warning
        log("moonpool: encoder outputs are not shared: %s", why)

    def _may_join(self) -> bool:
        """Tries to join, unless the weights are still being read. Whether it did."""
        if self.refusal or self._left or (self._reading is not None and not self._reading.over.is_set()):
            return False
        try:
            self.join()
        except Pending as pending:
            self._left, self._reading = False, pending.reading
            if not self._quiet:
                self._log.info("moonpool: %s; encoder outputs are shared from then on", pending)
            return False
        except (Refused, Error) as error:
            self.refuse(str(error))
            return False
        return True
