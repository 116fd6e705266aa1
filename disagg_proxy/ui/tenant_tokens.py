"""Tokens of prompts by tenant and by where they were taken to lie."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

TENANTS_MAX = 64
OTHER = "other"


class Tokens(msgspec.Struct):
    """own: in the cache of the engine that computed the prompt; pool: fetched; computed: the rest."""

    own: int = 0
    pool: int = 0
    computed: int = 0


class TenantTokens:
    """Sums of the first TENANTS_MAX tenants that have a request, and of all others together: a sum never
    falls, and clients that make up tenants cannot make the table long."""

    def __init__(self) -> None:
        self._sums: dict[str, Tokens] = {}

    @property
    def sums(self) -> Mapping[str, Tokens]:
        """By tenant; "": of requests without one."""
        return self._sums

    def add(self, tenant: str, *, own: int, pool: int, computed: int) -> None:
        """The tokens of one prompt."""
        if tenant not in self._sums and len(self._sums) >= TENANTS_MAX:
            tenant = OTHER
        sums = self._sums.setdefault(tenant, Tokens())
        sums.own += own
        sums.pool += pool
        sums.computed += computed
