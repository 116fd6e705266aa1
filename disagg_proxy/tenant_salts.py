"""Salts of tenants: engines tell equal prompts apart by them (``cache_salt``), so that a tenant finds no
block of another one, nor learns by time or by counts of cached tokens what others have asked.

Every request of a client with a row gets one (csrc/relay/request.cpp), so no client can name another
tenant's: what it says itself is hashed together with its own. They are the same in each proxy, and after a
new start.
"""

from __future__ import annotations

import hashlib

_DOMAIN = b"moonpool tenant salt 1\0"


def salt_of(tenant: str) -> str:
    """64 hexadecimal digits."""
    return hashlib.sha256(_DOMAIN + tenant.encode()).hexdigest()


def told_salt(salt: str, own: str | None) -> str | None:
    """What an engine is told of a tenant with ``salt`` ("": none) whose client says ``own``."""
    return hashlib.sha256((salt + own).encode()).hexdigest() if salt and own is not None else salt or own
