"""Clients without a key, and clients that say to engines what they may not, against a proxy whose engines are
in this process and note what reaches them."""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import suppress

from benchmarks.hostile.bed import COMPLETIONS, HERE, MIB, Setting, ask, bearer, none_of
from benchmarks.report import Row
from tests.disagg_proxy.harness import Client, MockEngine
from tests.hostile.forged import FORGED, WORDS, shown
from tests.hostile.operators_paths import DOTS, OPERATORS

STRANGERS = 16
KEY = "of-a-client"
BODY = b'{"prompt":"%b"}' % (b"a" * 20_000)
PAUSE_S = 0.05


def held_bodies(setting: Setting) -> list[Row]:
    """16 strangers send all of a body of 62 MiB that they may, and one byte now and then; whenever they are
    cut off they begin again."""
    keys = setting.folder / "keys"
    keys.write_text(KEY + "\n")
    _, engine = setting.mock_engine()
    _, port = setting.proxy("--engine", f"http://{HERE}:{engine}", "--api-keys-file", keys)
    ended = threading.Event()

    def hold() -> None:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: p\r\nContent-Length: {62 * MIB}\r\n\r\n".encode()
        piece = b"x" * MIB
        while not ended.wait(PAUSE_S):
            with suppress(OSError), socket.create_connection((HERE, port), 10) as connection:
                connection.sendall(head)
                for _ in range(61):
                    connection.sendall(piece)
                while not ended.wait(1.0):
                    connection.sendall(b"x")

    strangers = [threading.Thread(target=hold) for _ in range(STRANGERS)]
    for stranger in strangers:
        stranger.start()
    requests = int(setting.long(500, 50))
    try:
        answers = [ask(port, "POST", COMPLETIONS, BODY, bearer(KEY)).status for _ in range(requests)]
    finally:
        ended.set()
        for stranger in strangers:
            stranger.join()
    work = f"{STRANGERS} strangers hold bodies: keyed requests refused of {requests}"
    return [none_of(work, sum(status != 200 for status in answers))]


def forged(setting: Setting) -> list[Row]:
    """Forty ways to name another host, rank or id to an engine; and paths that are its operator's."""
    paths = [*OPERATORS, *DOTS]

    async def attack() -> tuple[int, int]:
        engine = MockEngine("a")
        await engine.start()
        try:
            url = f"a=http://{HERE}:{engine.port}"
            # Not on this loop's thread: the proxy's first check of the engine is answered here.
            _, port = await asyncio.to_thread(setting.proxy, "--tokenizer", "none", "--engine", url)
            for path, body, head in FORGED:
                client = Client(*await asyncio.open_connection(HERE, port))
                await client.ask("POST", path, body.encode(), head)
                client.leave()
            told = [shown(exchange) for exchange in engine.seen]
            if len(told) != len(FORGED):
                raise AssertionError(f"{len(told)} of {len(FORGED)} requests reached the engine")
            engine.seen.clear()
            for path in paths:
                client = Client(*await asyncio.open_connection(HERE, port))
                await client.ask("POST", path, b'{"lora_path":"/etc"}')
                client.leave()
            return sum(WORDS.search(each) is not None for each in told), len(engine.seen)
        finally:
            await engine.stop()

    fields, operators = asyncio.run(attack())
    return [
        none_of(f"forged fields that reached an engine, of {len(FORGED)}", fields),
        none_of(f"operators' paths and dot segments that reached an engine, of {len(paths)}", operators),
    ]
