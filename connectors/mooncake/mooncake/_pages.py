"""The HTTP pages that scripts poll: those of a master, and those of a store's process.

What names a key needs the master's admin token (``Authorization: Bearer ...``), as moonpool's own pages.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aiohttp import web

from moonpool.core.config.cluster_token import secrets_of
from moonpool.core.config.config import Config
from moonpool.core.errors import Error, Unavailable
from moonpool.core.service import metrics
from moonpool.core.service.addresses import Address
from moonpool.core.service.admin_http import AdminServer, bearer_is
from moonpool.core.service.http_tls import followed_context
from moonpool.core.service.master import PREFIX, Master, NodeRow
from moonpool.core.store.keys import Space
from moonpool.core.store.store import ROWS_MAX, Store

from ._access import NAMESPACE, Access, OwnNode
from ._base import key_of
from ._codes import Code, code_of
from ._drain import DrainJobs, Refused, failure
from ._segment_names import members_by_segment, segment_of

if TYPE_CHECKING:
    from .store import MooncakeDistributedStore

START_TIMEOUT_S = 10.0
CONNECTIONS_MAX = 64
TIMEOUT_S = 10.0


class MasterPages:
    """Beside a running Master, on ``address``."""

    def __init__(self, master: Master, address: Address) -> None:
        config = master.config
        self._master = master
        self._token = config.read_admin_token()
        self._drains = DrainJobs(self._living, self._become_a_guest)
        self._http = AdminServer(
            address,
            {
                "/health": self._health,
                "/role": self._role,
                "/metrics": self._metrics,
                "/metrics/summary": self._summary,
                "/get_all_segments": self._segments,
                "/get_segments_detail": self._segments_detail,
            },
            key="--metrics_port",
            connections_max=config.master.http_connections_max,
            timeout_s=config.master.http_timeout_s,
            private={
                "/get_all_keys": self._keys,
                "/query_key": self._key,
                "/batch_query_keys": self._some_keys,
                "/query_segment": self._segment,
                "/api/v1/segments/status": self._segment_status,
                "POST /api/v1/drain_jobs": self._drain,
                "/api/v1/drain_jobs/query": self._drain_job,
                "POST /api/v1/drain_jobs/query": self._drain_job,
            },
            is_allowed=lambda authorization: bearer_is(authorization, *secrets_of(self._token)),
            tls=followed_context(config),
        )

    async def start(self) -> None:
        """Begins to listen."""
        await self._http.start()

    async def close(self) -> None:
        """Stops listening and ends drain jobs."""
        await self._http.close()
        await asyncio.to_thread(self._drains.close)

    @property
    def url(self) -> str:
        """Where the pages are."""
        return self._http.url

    def _become_a_guest(self, store: MooncakeDistributedStore) -> int:
        address = self._master.addresses[0]
        host, _, port = address.rpartition(":")
        here = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(host, host)
        return store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", f"{here}:{port}")

    def _living(self) -> list[NodeRow]:
        return [row for row in self._master.nodes() if row.state == "alive"]

    async def _rows(self) -> list[NodeRow]:
        return await asyncio.to_thread(self._living)

    # ---- for all clients

    async def _health(self) -> web.Response:
        return web.json_response(
            {
                "status": "ok",
                "role": "leader",
                "ha_state": "serving",
                "service_ready": True,
                "leader_address": None,
            }
        )

    async def _role(self) -> web.Response:
        return web.Response(text="leader")

    async def _metrics(self) -> web.Response:
        body = await asyncio.to_thread(metrics.exposition, self._master.server, prefix=PREFIX)
        extra = "".join(
            f"# TYPE {name} gauge\n{name} {value}\n" for name, value in totals(await self._rows()).items()
        )
        return web.Response(body=body + extra.encode(), headers={"Content-Type": metrics.CONTENT_TYPE})

    async def _summary(self) -> web.Response:
        found = totals(await self._rows())
        used, size = found["master_allocated_bytes"], found["master_total_capacity_bytes"]
        return web.Response(
            text=f"role=leader, state=serving, service_ready=true, master={{Mem Storage: {used} B / {size} B"
            f" | Keys: {found['master_key_count']} | Clients: {found['master_active_clients']}}}"
        )

    async def _segments(self) -> web.Response:
        return web.Response(
            text="".join(f"{segment_of(row.name, row.address)}\n" for row in await self._rows())
        )

    async def _segments_detail(self) -> web.Response:
        rows = [detail(row) for row in await self._rows()]
        return web.json_response({"total_segments": len(rows), "segments": rows})

    # ---- with the admin token

    async def _segment(self, request: web.Request) -> web.Response:
        row = await self._named(request)
        if row is None:
            return web.Response(status=404, text="no such segment\n")
        return web.Response(
            text=f"{segment_of(row.name, row.address)}: used {row.dram_bytes - row.dram_free_bytes}, "
            f"capacity {row.dram_bytes}\n"
        )

    async def _segment_status(self, request: web.Request) -> web.Response:
        name = request.query.get("segment", "")
        if not name:
            return _refused(Refused(Code.INVALID_PARAMS, 400, "Missing or invalid segment"))
        row = await self._named(request)
        if row is None:
            return _refused(Refused(Code.SEGMENT_NOT_FOUND, 404))
        state = self._drains.state_of(row)
        page = {"success": True, "segment": name, "status": int(state), "status_name": state.name}
        return web.json_response(page | {"error_code": 0, "error_message": "", "data": detail(row)})

    async def _drain(self, request: web.Request) -> web.Response:
        try:
            body = await request.json()
        except ValueError as error:  # also what is no text
            return _refused(Refused(Code.INVALID_PARAMS, 400, f"Invalid JSON body: {error!s:.80}"))
        try:
            job = await asyncio.to_thread(self._drains.create, body)
        except Refused as error:
            return _refused(error)
        page = {"success": True, "job_id": job.id, "status": "CREATED"}
        return web.json_response(page | {"error_code": 0, "error_message": ""})

    async def _drain_job(self, request: web.Request) -> web.Response:
        """The job in ?job_id=, or in the JSON body of a POST."""
        job_id = request.query.get("job_id", "")
        if not job_id and request.method == "POST":
            try:
                job_id = str((await request.json())["job_id"])
            except (ValueError, TypeError, KeyError):
                job_id = ""
        try:
            return web.json_response(self._drains.query(job_id).page())
        except Refused as error:
            return _refused(error)

    async def _named(self, request: web.Request) -> NodeRow | None:
        name = request.query.get("segment", "")
        return members_by_segment(await self._rows()).get(name)

    async def _keys(self, _request: web.Request) -> web.Response:
        def ask(store: Store) -> str:
            return "".join(
                f"{row.key.decode(errors='backslashreplace')}\n" for row in store.list(limit=ROWS_MAX)
            )

        return await self._told(ask, lambda text: web.Response(text=text))

    async def _key(self, request: web.Request) -> web.Response:
        key = request.query.get("key", "")

        def answer(size: int | None) -> web.Response:
            if size is None:
                failure = {"error_code": int(Code.OBJECT_NOT_FOUND), "error_message": "OBJECT_NOT_FOUND"}
                return web.json_response({"success": False, **failure}, status=404)
            return web.json_response({"success": True, "data": {"key": key, "size": size}})

        return await self._told(lambda store: size_in(store, key), answer)

    async def _some_keys(self, request: web.Request) -> web.Response:
        keys = [key for key in request.query.get("keys", "").split(",") if key]

        def row(size: int | None) -> dict[str, Any]:
            return {"ok": False, "error": "OBJECT_NOT_FOUND"} if size is None else {"ok": True, "size": size}

        return await self._told(
            lambda store: {key: row(size_in(store, key)) for key in keys},
            lambda rows: web.json_response({"success": True, "data": rows}),
        )

    async def _told(self, ask: Callable[[Store], Any], answer: Callable[[Any], web.Response]) -> web.Response:
        """Nodes keep the text of keys: the first one that answers asks the others itself."""
        try:
            return answer(await asyncio.to_thread(self._ask_a_node, ask))
        except Error as error:
            return web.json_response({"success": False, "error_message": str(error)}, status=503)

    def _ask_a_node(self, ask: Callable[[Store], Any]) -> Any:
        answer = self._master.ask_a_node(Space(namespace=NAMESPACE), ask)
        if answer is None and not self._living():
            raise Unavailable("the pool has no node", operation="keys")
        return answer


def _refused(error: Refused) -> web.Response:
    return web.json_response(failure(error), status=error.status)


def size_in(store: Store, key: str) -> int | None:
    """Bytes of an object of the tenant "default", none of which are read."""
    found = store.stat(key_of(key)) if key else None
    return None if found is None else found.size


def totals(rows: list[NodeRow]) -> dict[str, int]:
    """Under the names that dashboards know."""
    size = sum(row.dram_bytes for row in rows)
    return {
        "master_active_clients": len(rows),
        "master_key_count": sum(row.keys for row in rows),
        "master_total_capacity_bytes": size,
        "master_allocated_bytes": size - sum(row.dram_free_bytes for row in rows),
        "master_total_file_capacity_bytes": sum(row.ssd_bytes for row in rows),
        "master_allocated_file_size_bytes": sum(row.ssd_bytes - row.ssd_free_bytes for row in rows),
    }


def detail(row: NodeRow) -> dict[str, Any]:
    """The JSON of one segment."""
    used = row.dram_bytes - row.dram_free_bytes
    return {
        "segment_name": segment_of(row.name, row.address),
        "segment_id": row.incarnation,
        "client_id": row.name,
        "base_address": "0x0",
        "size_bytes": row.dram_bytes,
        "te_endpoint": row.address,
        "protocol": "tcp",
        "status": "OK",
        "allocator_used_bytes": used,
        "allocator_capacity_bytes": row.dram_bytes,
        "allocator_usage_percent": round(100 * used / row.dram_bytes, 2) if row.dram_bytes else 0.0,
    }


class ClientPages:
    """/metrics and /health of a store's process, on 127.0.0.1, on its own thread. Raises ConfigError."""

    def __init__(self, access: Access, port: int) -> None:
        self._access = access
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._http = AdminServer(
            Address("127.0.0.1", port),
            {"/metrics": self._metrics, "/health": self._health},
            key="client_http_port",
            connections_max=CONNECTIONS_MAX,
            timeout_s=TIMEOUT_S,
        )
        self._thread = threading.Thread(target=self._loop.run_forever, name="mooncake-pages", daemon=True)
        self._thread.start()
        try:
            self._run(self._http.start())
        except BaseException:
            self._end()
            raise
        self.url = self._http.url

    def close(self) -> None:
        """Does nothing where the thread is not, or runs no more: in a child of fork(), at the very end."""
        if os.getpid() != self._pid or sys.is_finalizing():
            return
        try:
            self._run(self._http.close())
        finally:
            self._end()

    def _run(self, act: Any) -> None:
        asyncio.run_coroutine_threadsafe(act, self._loop).result(START_TIMEOUT_S)

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(START_TIMEOUT_S)
        self._loop.close()

    async def _metrics(self) -> web.Response:
        if isinstance(self._access, OwnNode):
            body = metrics.exposition(self._access.server)
            return web.Response(body=body, headers={"Content-Type": metrics.CONTENT_TYPE})
        return web.Response(text="# this process has no segment of its own\n")

    async def _health(self) -> web.Response:
        try:
            await asyncio.to_thread(self._access.members)
        except Error as error:
            page = {"status": "degraded", "reason": str(error), "code": int(code_of(error, "health"))}
            return web.Response(status=503, text=json.dumps(page), content_type="application/json")
        return web.json_response({"status": "ok", "segment": self._access.segment})


def config_of(listen: str, **arguments: object) -> Config:
    """Of a master that listens there."""
    from moonpool.core.config.config import load

    given = {name.replace("__", "."): value for name, value in arguments.items()}
    return load(arguments={"master.listen": listen, "master.http": "off"} | given)
