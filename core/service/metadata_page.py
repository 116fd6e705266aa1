"""The page /metadata of a master: where transfer engines publish their names (core/transfer/metadata)."""

from __future__ import annotations

from aiohttp import web

from moonpool.core.config.cluster_token import secrets_of
from moonpool.core.service.admin_http import bearer_is
from moonpool.core.transfer.metadata.http_metadata import bearer_of
from moonpool.core.transfer.metadata.leased_values import LeasedValues, page_of

VALUES_BYTES_MAX = 16 << 20


class MetadataPage:
    """token: the cluster token. Names are in memory: engines publish them anew to a master that restarted."""

    def __init__(self, token: bytes) -> None:
        self._token = token
        self._values = LeasedValues(VALUES_BYTES_MAX)

    async def answer(self, request: web.Request) -> web.Response:
        """Answers GET, PUT and DELETE of those who show that they know the cluster token."""
        bearers = (bearer_of(secret).encode() for secret in secrets_of(self._token))
        if not bearer_is(request.headers.get("Authorization", ""), *bearers):
            return web.Response(
                status=401,
                text="this page is for transfer engines with the cluster token of this master\n",
                headers={"WWW-Authenticate": "Bearer"},
            )
        page = page_of(self._values, request.method, request.query, await request.read())
        return web.Response(
            status=page.status, body=page.body, content_type="application/json", headers=page.headers
        )
