"""An engine whose KV events come faster than they can be looked at: what waits does not wait in the proxy."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
import threading

import msgspec
import pytest
import zmq

from moonpool.core.service.kv_event_publisher import Batch, BlockStored
from tests.disagg_proxy.harness import MockEngine, with_deadline

pytestmark = pytest.mark.timeout(260)

BLOCK = 16
BLOCKS = 60_000  # of a message; so it has 4 MiB
MESSAGES = 80
MORE_MAX = 128 << 20  # bytes that the proxy may take besides; without a bound it takes most of 400 MiB


def peak_bytes(process: int, what: str) -> int:
    """VmRSS or VmHWM of a process."""
    with open(f"/proc/{process}/status") as status:
        found = re.search(rf"^{what}:\s+(\d+) kB$", status.read(), re.M)
    assert found is not None
    return int(found[1]) << 10


def flood(pub: zmq.Socket[bytes], done: threading.Event) -> None:
    """MESSAGES batches, as fast as ZMQ takes them; then one that ends them, again and again."""
    names = [(1 << 62) + number for number in range(BLOCKS)]
    event = BlockStored(names, None, [(1 << 16) + number for number in range(BLOCKS * BLOCK)], BLOCK)
    payload = msgspec.msgpack.encode(Batch(0.0, [event]))
    assert len(payload) > 4 << 20
    for number in range(MESSAGES):
        while not done.is_set():
            try:
                pub.send_multipart((b"kv", number.to_bytes(8, "big"), payload))
                break
            except zmq.Again:
                continue


async def metric(port: int, name: str) -> float:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
    page = (await reader.read()).decode()
    writer.close()
    found = re.search(rf'^moonpool_proxy_events_{name}{{stream="a"}} (\S+)$', page, re.M)
    return 0.0 if found is None else float(found[1])


async def _flood_takes_a_bounded_memory() -> None:
    """S13: 3.6 GB of valid batches made the proxy 3.6 GB larger."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    pub = context.socket(zmq.XPUB)
    pub.setsockopt(zmq.XPUB_NODROP, 1)
    pub.setsockopt(zmq.SNDHWM, 1)
    pub.setsockopt(zmq.SNDTIMEO, 100)
    pub.bind("tcp://127.0.0.1:0")
    endpoint = pub.getsockopt_string(zmq.LAST_ENDPOINT)
    engine = MockEngine("a")
    await engine.start()
    stream, ours = f"a={endpoint}", f"a=http://127.0.0.1:{engine.port}"
    arguments = ["--listen", "127.0.0.1:0", "--tokenizer", "none", "--engine", ours, "--events", stream]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "moonpool", "proxy", *arguments, stdout=asyncio.subprocess.PIPE
    )
    done = threading.Event()
    flooding = threading.Thread(target=flood, args=(pub, done))
    try:
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        port = int(re.findall(r"serving on http://127\.0\.0\.1:(\d+)", line)[0])
        assert await asyncio.to_thread(pub.poll, 60_000)  # it has subscribed
        before = peak_bytes(process.pid, "VmRSS")
        flooding.start()
        while await metric(port, "blocks_stored_total") < MESSAGES * BLOCKS:
            await asyncio.sleep(0.1)  # the proxy has to look at all of it
        assert peak_bytes(process.pid, "VmHWM") - before <= MORE_MAX
        assert await metric(port, "gaps_total") == 0
    finally:
        done.set()
        if flooding.ident is not None:
            await asyncio.to_thread(flooding.join)
        context.destroy(linger=0)
        with contextlib.suppress(ProcessLookupError):  # it ended by itself
            process.kill()
        await process.wait()
        await engine.stop()


test_a_flood_takes_a_bounded_memory = with_deadline(_flood_takes_a_bounded_memory, 240.0)
