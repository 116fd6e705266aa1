"""Certificates, their keys and the authorities: what [cluster] and [proxy] name."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from moonpool.core.config.config import Config
from moonpool.core.doctor.finding import Finding, absent, broken, weak, works
from moonpool.core.doctor.host import Host
from moonpool.core.errors import ConfigError
from moonpool.core.service.http_tls import TlsFiles, client_side_of, engine_side_of, files_of, serving

SOON_S = 30 * 86400  # a certificate that ends within that time is named
_BEGIN, _END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"


class Validity(NamedTuple):
    """From when to when a certificate counts, in seconds since 1970."""

    from_s: float
    to_s: float


def check(host: Host, config: Config) -> Iterator[Finding]:
    """All checks of this file."""
    cluster = files_of(config)
    if not cluster.cert and not cluster.key:
        yield absent("TLS certificate", "none is configured: pages are http")
    yield from _side(host, "", cluster)
    yield from _side(host, " of the proxy", client_side_of(config.proxy))
    yield from _side(host, " of the proxy towards engines", engine_side_of(config.proxy))


def _side(host: Host, whose: str, files: TlsFiles) -> Iterator[Finding]:
    """The files of one side of TLS that are configured."""
    if files.cert or files.key:
        yield from _own(host, f"TLS certificate{whose}", files)
    if files.ca:
        yield from _dates(host, f"TLS authorities{whose}", files.ca_setting, files.ca)


def _own(host: Host, check: str, files: TlsFiles) -> Iterator[Finding]:
    """The certificate and its key, as a process of ours would load them."""
    try:
        serving(files)
    except ConfigError as error:
        yield broken(
            check,
            str(error),
            "name a certificate in PEM form and its own key (mode 0600); docs/security.md",
        )
        return
    yield from _dates(host, check, files.cert_setting, files.cert)


def _dates(host: Host, check: str, key: str, file: str) -> Iterator[Finding]:
    """A finding for each certificate of the file that does not count now, or ends soon; else one for all."""
    try:
        found = validities(Path(file).read_text())
    except (OSError, UnicodeDecodeError, ValueError) as error:
        yield broken(
            check, f"{key} = {file} cannot be read: {error}", "name a file of certificates in PEM form"
        )
        return
    now_s, is_sound = host.now_s(), True
    for number, (from_s, to_s) in enumerate(found):
        which = f"{key} = {file}" + (f", its certificate {number + 1}," if len(found) > 1 else "")
        if to_s <= now_s:
            yield broken(
                check,
                f"{which} has expired on {_day(to_s)}",
                "put a new certificate there; processes that run take it at once",
            )
        elif from_s > now_s:
            yield broken(
                check,
                f"{which} is not valid before {_day(from_s)}",
                "look at this machine's clock (chronyc tracking), or take another certificate",
            )
        elif to_s - now_s < SOON_S:
            days = int((to_s - now_s) // 86400)
            when = f"in {days} day{'' if days == 1 else 's'}, on {_day(to_s)}"
            yield weak(
                check,
                f"{which} expires {when}",
                "put a new certificate there; processes that run take it at once",
            )
        else:
            continue
        is_sound = False
    if is_sound:
        yield works(check, f"{file} is valid until {_day(min(validity.to_s for validity in found))}")


def validities(pem: str) -> list[Validity]:
    """Of each certificate of a file. Raises ValueError when it has none, or one that is damaged."""
    *certificates, _ = pem.split(_END)
    if not certificates:
        raise ValueError("it has no certificate")
    made = (f"{_BEGIN}{text.rpartition(_BEGIN)[2]}{_END}\n" for text in certificates)
    return [_validity(ssl.PEM_cert_to_DER_cert(text)) for text in made]


def _validity(der: bytes) -> Validity:
    """Certificate -> tbsCertificate -> behind version (may lack), serial, algorithm and issuer: validity
    (RFC 5280, 4.1).
    """
    try:
        ((_, certificate),) = _elements(der)
        fields = _elements(_elements(certificate)[0][1])
        is_versioned = fields[0][0] == 0xA0
        first, last = _elements(fields[4 if is_versioned else 3][1])
        return Validity(_time_s(*first), _time_s(*last))
    except (IndexError, ValueError) as error:
        raise ValueError("a certificate is damaged") from error


def _elements(der: bytes) -> list[tuple[int, bytes]]:
    """(tag, content) of DER elements that follow each other. Raises IndexError or ValueError."""
    found, at = [], 0
    while at < len(der):
        tag, length, at = der[at], der[at + 1], at + 2
        if length & 0x80:
            digits = length & 0x7F
            length, at = int.from_bytes(der[at : at + digits], "big"), at + digits
        if at + length > len(der):
            raise ValueError("an element is cut")
        found.append((tag, der[at : at + length]))
        at += length
    return found


def _time_s(tag: int, text: bytes) -> float:
    """UTCTime (of 1950 to 2049) or GeneralizedTime, in UTC."""
    digits = text.decode("ascii")
    if tag == 0x17:
        digits = ("19" if digits >= "5" else "20") + digits
    return datetime.strptime(digits, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()


def _day(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d")
