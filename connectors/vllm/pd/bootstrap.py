"""``GET /query``: where decode engines find the workers of a prefill engine, in the concurrent form. The page
is the one of vLLM's MooncakeConnector, so its example proxy works:

    {"0": {"engine_id": "...", "worker_addr": {"<tensor rank>": {"<pipeline rank>": "host:port"}}}}

An engine that offers blocks of its own cache takes ``POST /cached`` (neighbour_asks.py). One that also takes
other engines' has "cached": true on its page.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec

from moonpool.connectors.vllm.pd.neighbour_asks import ASK_BYTES_MAX, PATH
from moonpool.connectors.vllm.pd.wire import Malformed
from moonpool.core.errors import ConfigError, Unavailable
from moonpool.core.service.addresses import Address
from moonpool.core.service.http_get import TimedReader, get_json

TIMEOUT_S = 2.0
WORKERS_MAX = 1024
CALLERS_MAX = 64  # at a time: each has a thread, for TIMEOUT_S at most


class _Member(msgspec.Struct):
    engine_id: str
    worker_addr: dict[str, dict[str, str]]


def _is_length(text: str) -> bool:
    """Whether it says how long the body of an ask is. Python's int() refuses thousands of digits."""
    return (
        text.isascii()
        and text.isdigit()
        and len(text) <= len(str(ASK_BYTES_MAX))
        and int(text) <= ASK_BYTES_MAX
    )


class _Server(ThreadingHTTPServer):
    """Serves CALLERS_MAX callers at a time and closes the connection of one more."""

    daemon_threads = True
    request_queue_size = CALLERS_MAX

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._room = threading.BoundedSemaphore(CALLERS_MAX)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread for it: its connection is closed, too
            self._room.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: a caller that hung up is not worth a traceback."""


class Bootstrap:
    """Serves the page from a thread of its own until ``close``."""

    def __init__(
        self,
        address: Address,
        *,
        dp_rank: int,
        engine_id: str,
        workers: dict[tuple[int, int], str],
        answer_ask: Callable[[bytes], bytes] | None = None,
        takes_cached: bool = False,
    ) -> None:
        """address: where to listen; port 0: any.
        dp_rank: the data-parallel replica of this engine.
        engine_id: vLLM's name for it.
        workers: (tensor rank, pipeline rank) -> address of the worker.
        answer_ask: answers an ask for cached blocks, raises Malformed; None: there is nothing to ask for.
        takes_cached: whether this engine asks others.

        Raises ConfigError when the address is in use.
        """
        table: dict[str, dict[str, str]] = {}
        for (tp_rank, pp_rank), place in sorted(workers.items()):
            table.setdefault(str(tp_rank), {})[str(pp_rank)] = place
        member: dict[str, Any] = {"engine_id": engine_id, "worker_addr": table}
        if answer_ask is not None and takes_cached:
            member["cached"] = True
        page = msgspec.json.encode({str(dp_rank): member})

        class Handler(BaseHTTPRequestHandler):
            timeout = TIMEOUT_S

            def setup(self) -> None:
                super().setup()
                self.rfile = TimedReader(self.connection, time.monotonic() + TIMEOUT_S).makefile("rb")

            def do_GET(self) -> None:
                found = self.path == "/query"
                self.answer(200 if found else 404, page if found else b"{}")

            def do_POST(self) -> None:
                length = self.headers.get("Content-Length", "")
                if self.path != PATH or answer_ask is None:
                    self.answer(404, b"{}")
                elif not _is_length(length):
                    self.answer(413, b"{}")
                else:
                    try:
                        self.answer(200, answer_ask(self.rfile.read(int(length))))
                    except Malformed:
                        self.answer(403, b"{}")

            def answer(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """Nothing: a page that is fetched once for each decode engine is not worth a line."""

        try:
            self._server = _Server((address.host, address.port), Handler)
        except OSError as error:
            raise ConfigError(
                f"the bootstrap page cannot be served at {address}: {error.strerror}; give another "
                f"bootstrap_port",
                operation="start",
                key="bootstrap_port",
                cause=error,
            ) from error
        self.address = Address(address.host, self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="moonpool-bootstrap", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stops serving and ends the thread."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def find_workers(url: str, engine_id: str) -> dict[tuple[int, int], str]:
    """(tensor rank, pipeline rank) -> address of each worker of ``engine_id``, asked of the bootstrap page
    at ``url``. Raises Unavailable."""
    answer = get_json(url.rstrip("/") + "/query", timeout_s=TIMEOUT_S)
    try:
        members = msgspec.convert(answer, dict[str, _Member]).values()
        for member in members:
            if member.engine_id == engine_id:
                workers = {
                    (int(tp_rank), int(pp_rank)): place
                    for tp_rank, stages in member.worker_addr.items()
                    for pp_rank, place in stages.items()
                }
                if not 0 < len(workers) <= WORKERS_MAX:
                    raise ValueError(f"{engine_id} has {len(workers)} workers")
                return workers
    except (msgspec.ValidationError, ValueError) as error:
        raise Unavailable(f"{url} is no bootstrap page: {error}", peer=url, cause=error) from error
    raise Unavailable(f"{url} knows no engine {engine_id}; it was restarted, perhaps", peer=url)
