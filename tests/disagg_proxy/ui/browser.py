"""A headless Chromium, driven over its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chromium-headless-shell")
FOUND = next((path for name in NAMES if (path := shutil.which(name))), None)
START_S = 60.0
UNTIL_S = 20
needs_chromium = pytest.mark.skipif(
    FOUND is None,
    reason="needs Chromium; `make test` installs it as root, else: apt-get install chromium",
)


class Tab:
    """problems: what the page's console, script and policy complained of."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.problems: list[str] = []
        self._socket = socket
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._session = ""
        self._loaded = asyncio.Event()
        self._reading = asyncio.ensure_future(self._read())

    async def start(self) -> None:
        target = await self.call("Target.createTarget", url="about:blank")
        made = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = made["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")

    async def call(self, method: str, **params: Any) -> Any:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_str(json.dumps(message))
        return await self._waiting[number]

    async def open(self, url: str) -> None:
        """Until it is loaded."""
        self._loaded.clear()
        await self.call("Page.navigate", url=url)
        await self._loaded.wait()

    async def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression. Raises AssertionError when it throws."""
        made = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in made, made["exceptionDetails"]
        return made["result"].get("value")

    async def until(self, expression: str) -> None:
        """Until it is true. Raises AssertionError with the page's text when it does not become so."""
        text = "document.body.innerText.slice(0, 2000) || 'nothing'"
        look = f"if ({expression}) done(''); else if (--left < 0) done({text}); else setTimeout(look, 20);"
        found = await self.evaluate(
            f"new Promise(function (done) {{ var left = {UNTIL_S * 50}; (function look() {{ {look} }})(); }})"
        )
        assert not found, f"{expression}: never; the page says: {found}; problems: {self.problems}"

    async def text(self, selector: str) -> str:
        found = await self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")
        return str(found)

    async def count(self, selector: str) -> int:
        return int(await self.evaluate(f"document.querySelectorAll({json.dumps(selector)}).length"))

    async def picture(self, path: Path, *, scheme: str = "light", width: int = 1360) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.call("Emulation.setEmulatedMedia", features=features)
        height = await self.evaluate("document.documentElement.scrollHeight")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await self.call("Emulation.setDeviceMetricsOverride", **size)
        made = await self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(made["data"]))

    async def close(self) -> None:
        self._reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reading

    async def _read(self) -> None:
        async for message in self._socket:
            said = json.loads(message.data)
            if "id" in said:
                waiting = self._waiting.pop(said["id"])
                if "error" in said:
                    waiting.set_exception(AssertionError(said["error"]))
                else:
                    waiting.set_result(said["result"])
            elif said["method"] == "Page.loadEventFired":
                self._loaded.set()
            elif said["method"] == "Runtime.exceptionThrown":
                self.problems.append(str(said["params"]["exceptionDetails"]))
            elif said["method"] == "Log.entryAdded" and said["params"]["entry"]["level"] == "error":
                self.problems.append(said["params"]["entry"]["text"])


@contextlib.asynccontextmanager
async def tab() -> AsyncIterator[Tab]:
    """An empty tab of a browser of its own."""
    assert FOUND is not None
    folder = Path(tempfile.mkdtemp(prefix="moonpool-chromium-"))
    flags = ["--headless=new", "--disable-gpu", "--no-first-run", "--disable-extensions", "--mute-audio"]
    flags += ["--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"]
    flags += ["--no-proxy-server", "--remote-debugging-port=0", f"--user-data-dir={folder}"]
    if os.geteuid() == 0:
        flags.append("--no-sandbox")  # Chromium's does not start as root; it sees our own page only
    process = await asyncio.create_subprocess_exec(
        FOUND, *flags, "about:blank", stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(START_S):
            where = await _where(process)
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(where, max_msg_size=1 << 26) as socket,
        ):
            made = Tab(socket)
            await made.start()
            try:
                yield made
            finally:
                await made.close()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        shutil.rmtree(folder, ignore_errors=True)


async def _where(process: asyncio.subprocess.Process) -> str:
    """The address of its DevTools, which it says on standard error."""
    assert process.stderr is not None
    said = []
    while line := await process.stderr.readline():
        said.append(line.decode(errors="replace"))
        if line.startswith(b"DevTools listening on "):
            return said[-1].split()[-1]
    raise AssertionError("Chromium did not start:\n" + "".join(said))
