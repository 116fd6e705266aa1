"""Other processes of the cluster, by their HTTP pages: their clocks and their versions beside ours.

Asked are the masters of cluster.master, at the port of master.http, and the node of this host. A page that
does not answer is no fault: many listen on the loopback of their own host alone.
"""

from __future__ import annotations

import http.client
import platform
import re
import ssl
from collections.abc import Iterator
from email.utils import parsedate_to_datetime

from moonpool import __version__
from moonpool.core.config.config import Config
from moonpool.core.doctor.finding import Finding, absent, broken, weak, works
from moonpool.core.doctor.host import Host
from moonpool.core.errors import ConfigError
from moonpool.core.service.addresses import Address, parse_address
from moonpool.core.service.http_get import exchange
from moonpool.core.service.http_tls import client_context, scheme
from moonpool.core.service.listen_addresses import OFF, master_ranges

ANSWER_S = 0.5
APART_S_MAX = 5.0  # clocks that are further apart are named
_VERSION = re.compile(r'^moonpool_\w+_build_info\{.*version="([^"]*)".*\} 1', re.M)


def check(host: Host, config: Config) -> Iterator[Finding]:
    """All checks of this file."""
    yield works("version", f"moonpool {__version__} on Python {platform.python_version()}")
    try:
        tls = client_context(config) if config.cluster.tls_cert else None
        asked = {**_masters(config), **_node(config)}
    except ConfigError as error:
        yield absent("clocks and versions", f"no other process is asked: {error}")
        return
    for name, address in asked.items():
        yield from _compare(host, name, f"{scheme(config)}://{address}/metrics", tls)


def _masters(config: Config) -> dict[str, Address]:
    if config.master.http == OFF:
        return {}
    port = parse_address(config.master.http, "master.http").port
    masters = [each for part in master_ranges(config) for each in part]
    return {f"master {each}": Address(each.host, port) for each in masters}


def _node(config: Config) -> dict[str, Address]:
    if config.node.http == OFF:
        return {}
    return {"node of this host": parse_address(config.node.http, "node.http")}


def _compare(host: Host, name: str, url: str, tls: ssl.SSLContext | None) -> Iterator[Finding]:
    began_s = host.now_s()
    try:
        answer = exchange("GET", url, timeout_s=ANSWER_S, tls=tls)
        date = answer.headers["Date"] or ""
        theirs_s = parsedate_to_datetime(date).timestamp() + 0.5  # it has whole seconds
    except ssl.SSLCertVerificationError as error:
        yield broken(
            name,
            f"the certificate at {url} is refused: {error.verify_message}",
            "renew that certificate, correct this machine's clock, or name its authority in cluster.tls_ca",
        )
        return
    except (OSError, http.client.HTTPException, ValueError, TypeError) as error:
        yield absent(name, f"its clock and version are not known: {url} does not answer ({error})")
        return
    ahead_s = (began_s + host.now_s()) / 2 - theirs_s
    if abs(ahead_s) > APART_S_MAX:
        way = "ahead of" if ahead_s > 0 else "behind"
        yield weak(
            name,
            f"this machine's clock is {abs(ahead_s):.0f} s {way} that of the {name}: dates of certificates, "
            "lag of KV events and times in logs are off",
            "run chronyd or systemd-timesyncd on both hosts",
        )
    version = _VERSION.search(answer.body.decode(errors="replace"))
    if version is None:
        yield weak(
            name, f"{url} does not say which version it is", "upgrade it, or look at what listens there"
        )
    elif version[1] != __version__:
        yield weak(
            name,
            f"the {name} runs version {version[1]}, this is {__version__}",
            "finish the upgrade on all hosts",
        )
    elif abs(ahead_s) <= APART_S_MAX:
        yield works(name, f"version {version[1]}, its clock within {APART_S_MAX:g} s of this one")
