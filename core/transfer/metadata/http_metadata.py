"""Names in an HTTP server: the page /metadata of our master, or the drop-in's http metadata server.

    PUT /metadata?key=KEY&owner=ID&lease_s=8[&dead=ID]   200; 409 with the holder's record
    GET /metadata?key=KEY                                200; 404
    DELETE /metadata?key=KEY&owner=ID                    200; 404; 409: it is another's

leased_values.py is the other side. A server that keeps no leases answers a PUT without LEASE_HEADER, and is
not used: a dead engine's name would stay there.
"""

from __future__ import annotations

import hashlib
import hmac
import ssl
from urllib.parse import quote, urlencode, urlsplit

from moonpool.core.config.cluster_token import secrets_of
from moonpool.core.errors import Unavailable
from moonpool.core.printable import printable
from moonpool.core.service.addresses import Address
from moonpool.core.service.http_get import Answer, exchange
from moonpool.core.transfer.metadata.backend import (
    ANSWER_BYTES_MAX,
    LEASE_S,
    TIMEOUT_S,
    Metadata,
    asking,
    refused,
    taken,
)
from moonpool.core.transfer.metadata.record import SegmentRecord, decode, key_of

LEASE_HEADER = "Moonpool-Lease"  # of an answer to PUT: seconds that were granted
LEFT_HEADER = "Moonpool-Lease-Left"  # of 409: seconds until the holder's lease ends


def bearer_of(secret: bytes) -> str:
    """What shows a master that a client knows the cluster token. It is derived, since it may travel in plain:
    it opens this page alone, and no handshake."""
    return hmac.new(secret, b"moonpool metadata", hashlib.sha256).hexdigest()


class HttpMetadata(Metadata):
    """url: of the page; token: the cluster token."""

    def __init__(
        self,
        url: str,
        token: bytes,
        *,
        tls: ssl.SSLContext | None = None,
        lease_s: float = LEASE_S,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        parts = urlsplit(url)
        self._url = url
        self._tls = tls
        self._token = token
        self._timeout_s = timeout_s
        self.lease_s = lease_s
        self.shown = printable(url)
        self.towards = Address(parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80))

    def publish(self, record: SegmentRecord, *, dead: str = "") -> None:
        """See Metadata."""
        more = {"owner": record.id, "lease_s": f"{self.lease_s:g}"} | ({"dead": dead} if dead else {})
        with asking(self.shown, "publish"):
            answer = self._ask("PUT", record.key, more, record.encode())
            if answer.status == 409:
                raise taken(record, answer.body, float(answer.headers[LEFT_HEADER] or "0"), self.shown)
            self._check(answer, "publish")
            if LEASE_HEADER not in answer.headers:
                self._ask("DELETE", record.key, {}, b"")
                raise Unavailable(
                    f"{self.shown} keeps no leases; use the page of `moonpool master`, or "
                    f"`mooncake_http_metadata_server` of moonpool",
                    operation="publish",
                    peer=self.shown,
                )

    def withdraw(self, record: SegmentRecord) -> None:
        """See Metadata."""
        with asking(self.shown, "withdraw"):
            answer = self._ask("DELETE", record.key, {"owner": record.id}, b"")
            if answer.status not in (404, 409):
                self._check(answer, "withdraw")

    def resolve(self, tenant: str, name: str) -> SegmentRecord | None:
        """See Metadata."""
        with asking(self.shown, "resolve"):
            answer = self._ask("GET", key_of(tenant, name), {}, b"")
            if answer.status == 404:
                return None
            self._check(answer, "resolve")
            return decode(answer.body, self.shown)

    def _ask(self, method: str, key: str, more: dict[str, str], body: bytes) -> Answer:
        query = urlencode({"key": key} | more, quote_via=quote)
        for secret in secrets_of(self._token):  # while one replaces the other the page may know either alone
            answer = exchange(
                method,
                f"{self._url}?{query}",
                body=body,
                headers={"Authorization": f"Bearer {bearer_of(secret)}"},
                timeout_s=self._timeout_s,
                tls=self._tls,
                answer_bytes_max=ANSWER_BYTES_MAX,
            )
            if answer.status != 401:
                break
        return answer

    def _check(self, answer: Answer, operation: str) -> None:
        if answer.status in (401, 403):
            raise refused(self.shown, operation, "it has another cluster token")
        if answer.status != 200:
            said = printable(answer.body[:200].decode(errors="replace").strip())
            raise Unavailable(
                f"{self.shown} answered {answer.status}: {said}", operation=operation, peer=self.shown
            )
