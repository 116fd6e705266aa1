"""HTTP pages with TLS: what is served, what is refused, and that deadlines hold in the handshake too."""

from __future__ import annotations

import asyncio
import os
import shutil
import ssl
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import web

from moonpool.core.config import config
from moonpool.core.errors import ConfigError, Unavailable
from moonpool.core.service import http_tls
from moonpool.core.service.addresses import Address
from moonpool.core.service.admin_http import AdminServer
from moonpool.core.service.http_get import answers_ok, get_json

CERTIFICATES = Path(__file__).parent / "certificates"
DEADLINE_S = 30


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Of [cluster]; the certificate signs itself, so it is its own authority."""
    for name in ("test-cert.pem", "test-key.pem"):
        shutil.copy(CERTIFICATES / name, tmp_path / name)
    (tmp_path / "test-key.pem").chmod(0o600)
    cert = str(tmp_path / "test-cert.pem")
    return {"tls_cert": cert, "tls_key": str(tmp_path / "test-key.pem"), "tls_ca": cert}


def made(files: dict[str, str]) -> config.Config:
    return config.load(env={}, arguments={f"cluster.{name}": file for name, file in files.items()})


def serving(
    settings: config.Config,
    body: Callable[[AdminServer], Awaitable[None]],
    *,
    timeout_s: float = 10.0,
    connections_max: int = 8,
) -> None:
    async def page() -> web.Response:
        return web.json_response({"x": "y" * 100_000})

    async def run() -> None:
        server = AdminServer(
            Address("127.0.0.1", 0),
            {"/page": page},
            key="--http",
            connections_max=connections_max,
            timeout_s=timeout_s,
            tls=http_tls.followed_context(settings),
        )
        async with asyncio.timeout(DEADLINE_S):
            await server.start()
            try:
                await body(server)
            finally:
                await server.close()

    asyncio.run(run())


async def fetched(server: AdminServer, settings: config.Config) -> object:
    url = f"{server.url}/page"
    return await asyncio.to_thread(get_json, url, timeout_s=10.0, tls=http_tls.client_context(settings))


def test_a_page_over_tls(files: dict[str, str]) -> None:
    settings = made(files)

    async def body(server: AdminServer) -> None:
        assert server.url.startswith("https://127.0.0.1:")
        for _ in range(3):
            assert await fetched(server, settings) == {"x": "y" * 100_000}
        assert await answers_ok(f"{server.url}/page")

    serving(settings, body)


def test_files_that_are_replaced_are_those_of_the_next_connection(
    files: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def replace(file: str, name: str) -> None:
        shutil.copy(CERTIFICATES / name, tmp_path / "new")
        (tmp_path / "new").chmod(0o600)
        (tmp_path / "new").rename(file)

    before, after = made(files), made({"tls_ca": str(CERTIFICATES / "authority.pem")})

    async def body(server: AdminServer) -> None:
        await fetched(server, before)
        replace(files["tls_cert"], "master.pem")  # of the same key, signed by the authority
        await fetched(server, after)
        replace(files["tls_cert"], "test-key.pem")  # no certificate
        for _ in range(2):
            await fetched(server, after)
        assert caplog.text.count("the files from before are in use") == 1
        replace(files["tls_cert"], "test-cert.pem")
        with pytest.raises(Unavailable, match="certificate verify failed"):
            await fetched(server, after)

    serving(before, body)


def test_who_does_not_know_the_authority_refuses_the_page(files: dict[str, str]) -> None:
    async def body(server: AdminServer) -> None:
        with pytest.raises(Unavailable, match="certificate verify failed"):
            await fetched(server, made({}))

    serving(made(files), body)


def test_plain_http_on_a_tls_port_gets_nothing(files: dict[str, str]) -> None:
    settings = made(files)

    async def body(server: AdminServer) -> None:
        reader, writer = await asyncio.open_connection(*server.address)
        writer.write(b"GET /page HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"HTTP/" not in await reader.read()
        writer.close()
        assert await fetched(server, settings) == {"x": "y" * 100_000}

    serving(settings, body)


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01"], ids=["nothing", "half a handshake"])
def test_a_handshake_that_does_not_come_is_cut_off(files: dict[str, str], sent: bytes) -> None:
    settings = made(files)

    async def body(server: AdminServer) -> None:
        began = asyncio.get_running_loop().time()
        reader, writer = await asyncio.open_connection(*server.address)
        writer.write(sent)
        assert await reader.read() == b""
        assert asyncio.get_running_loop().time() - began < 5 * 0.2
        writer.close()

    serving(settings, body, timeout_s=0.2)


def test_too_many_half_open_handshakes_close_the_oldest(files: dict[str, str]) -> None:
    settings = made(files)

    async def body(server: AdminServer) -> None:
        idle = [await asyncio.open_connection(*server.address) for _ in range(8)]
        assert await fetched(server, settings) == {"x": "y" * 100_000}
        assert await idle[0][0].read() == b""
        assert server.connections <= 4
        for _, writer in idle:
            writer.close()

    serving(settings, body, timeout_s=3600, connections_max=4)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"tls_key": ""}, "cluster.tls_cert is set and cluster.tls_key is not; set both or none"),
        ({"tls_cert": ""}, "cluster.tls_key is set and cluster.tls_cert is not; set both or none"),
        ({"tls_cert": "/no/cert"}, "cluster.tls_cert = /no/cert and .* cannot be used: No such file"),
        ({"tls_key": "/no/key"}, "cannot read cluster.tls_key = /no/key: No such file"),
        ({"tls_key": "CERT"}, "cannot be used: .*; they must be a certificate in PEM form and its key"),
        ({"tls_ca": "/no/ca"}, "cluster.tls_ca = /no/ca cannot be used: No such file"),
        (
            {"tls_ca": "EMPTY"},
            "cluster.tls_ca = .* cannot be used: .*; it must hold certificates in PEM form",
        ),
    ],
)
def test_files_that_cannot_serve_are_one_sentence(
    files: dict[str, str], tmp_path: Path, change: dict[str, str], sentence: str
) -> None:
    (tmp_path / "empty").touch()
    Path(files["tls_cert"]).chmod(0o600)
    names = {"CERT": files["tls_cert"], "EMPTY": str(tmp_path / "empty")}
    settings = made(files | {key: names.get(file, file) for key, file in change.items()})
    make = http_tls.client_context if "tls_ca" in change else http_tls.server_context
    with pytest.raises(ConfigError, match=sentence) as caught:
        make(settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("shown", ["common-name", "test-cert"])
def test_a_name_is_an_alternative_name(tmp_path: Path, shown: str) -> None:
    """As the data plane has it: an engine that only one of the two accepts would come and go."""
    certificates = Path(__file__).parent / "certificates"
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificates / f"{shown}.pem", certificates / "test-key.pem")
    client = http_tls.asking(http_tls.TlsFiles(ca=str(certificates / f"{shown}.pem")))
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    asked = server.wrap_bio(up, down, server_side=True)
    asking = client.wrap_bio(down, up, server_hostname="localhost")
    with pytest.raises(ssl.SSLWantReadError):
        asking.do_handshake()
    with pytest.raises(ssl.SSLWantReadError):
        asked.do_handshake()
    if shown == "test-cert":
        asking.do_handshake()
    else:
        with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
            asking.do_handshake()


def test_chains_are_verified_as_by_the_data_plane() -> None:
    """Whatever this Python's default is."""
    flags = http_tls.asking(http_tls.TlsFiles()).verify_flags
    assert not flags & (ssl.VERIFY_X509_PARTIAL_CHAIN | ssl.VERIFY_X509_STRICT)


def test_a_key_that_others_can_read_is_refused(files: dict[str, str]) -> None:
    Path(files["tls_key"]).chmod(0o640)
    with pytest.raises(ConfigError, match=r"can be read by others \(mode 0640\); run: chmod 600"):
        http_tls.server_context(made(files))


@pytest.mark.skipif(os.geteuid() != 0, reason="it gives a file to root and goes on as another user")
@pytest.mark.parametrize(("mode", "usable"), [(0o440, True), (0o640, True), (0o444, False), (0o460, False)])
def test_a_key_of_root_may_be_readable_for_a_group(mode: int, usable: bool) -> None:
    """As those of Kubernetes' secrets are, which a process of another user reads by its group."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o711)
        key = Path(folder) / "key.pem"
        key.touch()
        os.chown(key, 0, 65534)
        key.chmod(mode)
        child = os.fork()
        if child == 0:
            code = 2
            try:
                os.setgid(65534)
                os.setuid(65534)
                http_tls.check_private_key(key)
                code = 0
            except ConfigError:
                code = 1
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (0 if usable else 1)


def test_without_a_certificate_pages_are_plain(files: dict[str, str]) -> None:
    assert http_tls.server_context(made({})) is None
    assert http_tls.scheme(made({})) == "http"
    assert http_tls.scheme(made(files)) == "https"
    assert http_tls.own_child_context().verify_mode is ssl.CERT_NONE
