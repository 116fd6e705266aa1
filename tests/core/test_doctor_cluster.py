"""The doctor's checks of what a cluster needs: certificates, files of keys, ports, clocks and versions."""

from __future__ import annotations

import base64
import http.server
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

from moonpool import __version__
from moonpool.core.config.config import Config, load
from moonpool.core.doctor import (
    Finding,
    Host,
    State,
    cluster_checks,
    examine,
    moonpool_checks,
    port_checks,
    tls_checks,
)
from moonpool.core.service.http_tls import server_context

from .master_bed import MasterProcess
from .tls_bed import CERTIFICATES
from .tls_bed import made as with_cluster
from .tls_bed import pem as pem

WORKS, ABSENT, WEAK, BROKEN = State.WORKS, State.ABSENT, State.WEAK, State.BROKEN
Pem = Callable[[str], str]
PAGE_S = 1_800_000_000


def made(**settings: object) -> Config:
    """Of ``section__key``."""
    return load(env={}, arguments={key.replace("__", ".", 1): value for key, value in settings.items()})


def at(day: str) -> Host:
    moment_s = datetime.fromisoformat(day).replace(tzinfo=UTC).timestamp()
    return Host(now_s=lambda: moment_s)


def only(findings: Iterator[Finding], check: str) -> Finding:
    (found,) = [finding for finding in findings if finding.check == check]
    assert bool(found.remedy) == (found.state in (WEAK, BROKEN)), found
    return found


# ---- certificates


@pytest.mark.parametrize(
    ("name", "day", "state", "part"),
    [
        ("master", "2026-11-29", WORKS, "is valid until 2120-01-01"),
        ("master-expired", "2026-11-29", BROKEN, "has expired on 2021-01-01"),
        ("master-future", "2026-11-29", BROKEN, "is not valid before 2119-01-01"),
        ("master", "2119-12-22", WEAK, "expires in 10 days, on 2120-01-01"),
        ("master-expired", "2020-12-31", WEAK, "expires in 1 day, on 2021-01-01"),
        ("master-expired", "2020-11-29", WORKS, "is valid until 2021-01-01"),
    ],
)
def test_the_dates_of_the_certificate(name: str, day: str, state: State, part: str, pem: Pem) -> None:
    config = with_cluster({"tls_cert": pem(name), "tls_key": pem("test-key")})
    found = only(tls_checks.check(at(day), config), "TLS certificate")
    assert found.state is state
    assert part in found.what


def test_the_files_of_the_proxy(pem: Pem) -> None:
    config = made(
        proxy__tls_cert=pem("master-expired"),
        proxy__tls_key=pem("test-key"),
        proxy__tls_client_ca=pem("authority"),
    )
    findings = {found.check: found for found in tls_checks.check(at("2026-11-29"), config)}
    assert findings["TLS certificate"].state is ABSENT
    found = findings["TLS certificate of the proxy"]
    assert found.state is BROKEN
    assert found.what.startswith("proxy.tls_cert = ")
    assert "has expired on 2021-01-01" in found.what
    assert findings["TLS authorities of the proxy"].state is WORKS
    config = made(proxy__engine_tls_ca=pem("master-expired"))
    found = only(tls_checks.check(at("2026-11-29"), config), "TLS authorities of the proxy towards engines")
    assert found.state is BROKEN
    assert found.what.startswith("proxy.engine_tls_ca = ")


def test_the_authorities_are_looked_at_one_by_one(pem: Pem, tmp_path: Path) -> None:
    file = tmp_path / "both.pem"
    file.write_text(Path(pem("authority")).read_text() + Path(pem("master-expired")).read_text())
    found = only(tls_checks.check(at("2026-11-29"), with_cluster({"tls_ca": str(file)})), "TLS authorities")
    assert found.state is BROKEN
    assert "both.pem, its certificate 2, has expired on 2021-01-01" in found.what
    file.write_text(Path(pem("authority")).read_text())
    found = only(tls_checks.check(at("2026-11-29"), with_cluster({"tls_ca": str(file)})), "TLS authorities")
    assert found.state is WORKS


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("", "it has no certificate"),
        (
            "-----BEGIN CERTIFICATE-----\nMIIBszCCAVmg\n-----END CERTIFICATE-----\n",
            "a certificate is damaged",
        ),
        ("-----BEGIN CERTIFICATE-----\n\n-----END CERTIFICATE-----\n", "a certificate is damaged"),
        (None, "No such file"),
    ],
)
def test_authorities_that_cannot_be_read(content: str | None, part: str, tmp_path: Path) -> None:
    file = tmp_path / "ca.pem"
    if content is not None:
        file.write_text(content)
    found = only(tls_checks.check(Host(), with_cluster({"tls_ca": str(file)})), "TLS authorities")
    assert found.state is BROKEN
    assert part in found.what


def test_a_key_that_does_not_fit_and_one_that_others_read(pem: Pem) -> None:
    another = Path(pem("test-key")).with_name("another.pem")
    # ECPrivateKey of RFC 5915 on P-256, the private number 7.
    der = bytes.fromhex("30310201010420" + "00" * 31 + "07" + "a00a06082a8648ce3d030107")
    text = base64.b64encode(der).decode()
    another.write_text(f"-----BEGIN EC PRIVATE KEY-----\n{text}\n-----END EC PRIVATE KEY-----\n")
    another.chmod(0o600)
    config = with_cluster({"tls_cert": pem("master"), "tls_key": str(another)})
    found = only(tls_checks.check(Host(), config), "TLS certificate")
    assert found.state is BROKEN
    assert "key values mismatch" in found.what
    Path(pem("test-key")).chmod(0o640)
    config = with_cluster({"tls_cert": pem("master"), "tls_key": pem("test-key")})
    found = only(tls_checks.check(Host(), config), "TLS certificate")
    assert found.state is BROKEN
    assert "can be read by others (mode 0640)" in found.what


def test_without_tls_nothing_is_wrong() -> None:
    (found,) = tls_checks.check(Host(), made())
    assert found.state is ABSENT


# ---- files of keys


def test_files_of_keys(runtime: Path, tmp_path: Path) -> None:
    good, shared, gone = (tmp_path / name for name in ("good", "shared", "gone"))
    good.write_text("a key")
    good.chmod(0o600)
    shared.write_text("a key")
    shared.chmod(0o644)
    config = made(
        cluster__admin_token_file=str(good),
        proxy__api_keys_file=str(shared),
        proxy__engine_key_file=str(gone),
        proxy__clients_file=str(shared),
    )
    found = {finding.check: finding for finding in moonpool_checks.check(config)}
    assert found["file cluster.admin_token_file"].state is WORKS
    assert found["file proxy.api_keys_file"].state is WEAK
    assert found["file proxy.api_keys_file"].remedy == f"chmod 600 {shared}"
    assert found["file proxy.clients_file"].state is WEAK
    assert found["file proxy.engine_key_file"].state is BROKEN
    assert "No such file" in found["file proxy.engine_key_file"].what
    assert "file proxy.discovery_keys_file" not in found


# ---- ports


def test_a_port_that_another_program_holds() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        address = f"127.0.0.1:{held.getsockname()[1]}"
        found = only(port_checks.check(made(node__listen=address)), "port node.listen")
        assert found.state is BROKEN
        assert f"node.listen = {address} is in use by process " in found.what
        assert "ss -ltnp" in found.remedy
    found = only(port_checks.check(made(node__listen=address)), "port node.listen")
    assert found.state is WORKS
    assert "port node.http" not in {each.check for each in port_checks.check(made(node__http="off"))}


def test_an_address_of_another_host() -> None:
    found = only(port_checks.check(made(master__listen="192.0.2.1:7700")), "port master.listen")
    assert found.state is BROKEN
    assert "no address of this host" in found.what


# ---- a real master, and pages that are not as they should be


def test_a_real_master_is_in_order(runtime: Path) -> None:
    master = MasterProcess()
    try:
        http = master.http.removeprefix("http://")
        config = made(cluster__master=master.address, master__listen=master.address, master__http=http)
        for check in ("port master.listen", "port master.http"):
            found = only(port_checks.check(config), check)
            assert found.state is WORKS
            assert f"process {master.process.pid} " in found.what
        found = only(cluster_checks.check(Host(), config), f"master {master.address}")
        assert found.state is WORKS
        assert f"version {__version__}, its clock within 5 s" in found.what
    finally:
        master.close()


@contextmanager
def page(*, version: str = __version__, text: str = "", tls: Any = None) -> Iterator[int]:
    """The port of a master's page, made at PAGE_S by its clock."""
    body = text or f'moonpool_master_build_info{{python="3.11.7",version="{version}"}} 1.0\n'

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body.encode())

        def date_time_string(self, timestamp: float | None = None) -> str:
            return formatdate(PAGE_S, usegmt=True)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever, args=[0.05])
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("how", "ahead_s", "state", "part"),
    [
        ({}, 4.0, WORKS, f"version {__version__}, its clock within 5 s of this one"),
        ({}, -90.0, WEAK, "clock is 90 s behind that of the master 127.0.0.1:7"),
        ({}, 3600.0, WEAK, "clock is 3600 s ahead of that of the master 127.0.0.1:7"),
        ({"version": "0.0.9"}, 0.0, WEAK, f"runs version 0.0.9, this is {__version__}"),
        ({"text": "hello"}, 0.0, WEAK, "does not say which version it is"),
    ],
)
def test_the_page_of_a_master(how: dict[str, Any], ahead_s: float, state: State, part: str) -> None:
    with page(**how) as port:
        config = made(cluster__master="127.0.0.1:7", master__http=f"127.0.0.1:{port}", node__http="off")
        found = only(
            cluster_checks.check(Host(now_s=lambda: PAGE_S + 0.5 + ahead_s), config), "master 127.0.0.1:7"
        )
    assert found.state is state
    assert part in found.what


def test_a_page_that_does_not_answer_is_no_fault(free_port: int) -> None:
    config = made(cluster__master="127.0.0.1:7", master__http=f"127.0.0.1:{free_port}")
    assert only(cluster_checks.check(Host(), config), "master 127.0.0.1:7").state is ABSENT


@pytest.mark.parametrize(
    ("certificate", "part"), [("master-expired", "has expired"), ("master-future", "not yet valid")]
)
def test_the_certificate_of_a_master_that_does_not_count(certificate: str, part: str, pem: Pem) -> None:
    cluster = {"tls_key": pem("test-key"), "tls_ca": pem("authority")}
    theirs = server_context(with_cluster({**cluster, "tls_cert": pem(certificate)}))
    with page(tls=theirs) as port:
        ours = {f"cluster__{name}": value for name, value in cluster.items()}
        config = made(
            **ours,
            cluster__tls_cert=pem("master"),
            cluster__master="127.0.0.1:7",
            master__http=f"127.0.0.1:{port}",
        )
        found = only(cluster_checks.check(Host(), config), "master 127.0.0.1:7")
    assert found.state is BROKEN
    assert part in found.what


def test_the_report_has_all_of_it(runtime: Path) -> None:
    expired = with_cluster({"tls_ca": str(CERTIFICATES / "master-expired.pem")})
    report = examine(Host(), expired)
    assert report.is_broken
    checks = {finding.check for finding in report.findings}
    assert {"TLS authorities", "port node.listen", "version", "node of this host"} <= checks
