"""Certificates for tests of the proxy's TLS, which tests replace while it runs, and contexts of clients."""

from __future__ import annotations

import os
import shutil
import ssl
from pathlib import Path

from moonpool.core.service.http_tls import TlsFiles, asking, serving

CERTIFICATES = Path(__file__).parents[1] / "core" / "certificates"


class Files:
    """In a folder of the test's: cert.pem and key.pem are one side's, ca.pem is whom the other trusts. All
    certificates there have the same key."""

    def __init__(self, folder: Path, cert: str = "master", ca: str = "authority") -> None:
        folder.mkdir()
        self.cert, self.key, self.ca = (str(folder / f"{name}.pem") for name in ("cert", "key", "ca"))
        self._put("test-key", self.key)
        self.show(cert)
        self._put(ca, self.ca)

    def show(self, name: str) -> None:
        """From now on cert.pem is the certificate of this name."""
        self._put(name, self.cert)

    def trust(self, name: str) -> None:
        """From now on ca.pem is the certificate of this name."""
        self._put(name, self.ca)

    def open_key(self) -> None:
        """From now on key.pem is another file with the same key, which others can read."""
        self._put("test-key", self.key, 0o644)

    def break_cert(self) -> None:
        """A certificate that no one can read, such as half of one."""
        Path(self.cert).write_text("-----BEGIN CERTIFICATE-----\n")

    def server(self, *, client_ca: str = "") -> ssl.SSLContext:
        """Of a server that shows cert.pem. client_ca: whom clients must have been signed by."""
        context = serving(TlsFiles(self.cert, self.key))
        if client_ca:
            context.load_verify_locations(client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def client(self, *, shows: Files | None = None) -> ssl.SSLContext:
        """Of a client that trusts ca.pem. shows: and shows the certificate of these."""
        cert, key = ("", "") if shows is None else (shows.cert, shows.key)
        return asking(TlsFiles(cert, key, self.ca))

    @staticmethod
    def _put(name: str, path: str, mode: int = 0o600) -> None:
        new = f"{path}.new"
        shutil.copy(CERTIFICATES / f"{name}.pem", new)
        os.chmod(new, mode)
        os.replace(new, path)
