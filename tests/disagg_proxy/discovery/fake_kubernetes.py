"""A small API server of Kubernetes over real HTTP: lists in pages, watches from a version, compaction,
tokens. It knows pods and selectors of equality, no more."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

Object = dict[str, Any]


def pod(name: str, ip: str = "10.0.0.1", *, phase: str = "Running", **meta: Any) -> Object:
    metadata = {"name": name, "labels": {"app": "vllm"}, **meta}
    return {"metadata": metadata, "status": {"phase": phase, "podIP": ip}, "spec": {"containers": []}}


def key_of(item: Object) -> str:
    meta = item["metadata"]
    return f"{meta['namespace']}/{meta['name']}" if "namespace" in meta else str(meta["name"])


class Kubernetes:
    def __init__(self) -> None:
        self.url = ""
        self.token = ""
        self.pods: dict[str, Object] = {}
        self.version = 100
        self.oldest = 0  # versions before it are gone
        self.status = 0  # what every request is answered with instead
        self.forgets = ""  # what it answers with 410: "watch", "line" (the first of a watch), or "list"
        self.lists = self.watches = 0
        self.watch_s = 3600.0  # then it ends a watch
        self._history: list[tuple[int, str, Object]] = []
        self._changed = asyncio.Event()
        self._cut = asyncio.Event()
        self._ended = False

    def put(self, item: Object) -> None:
        key = key_of(item)
        self._say("MODIFIED" if key in self.pods else "ADDED", item)
        self.pods[key] = item

    def delete(self, name: str) -> None:
        """name: behind its namespace and a slash, where the pod has one."""
        self._say("DELETED", self.pods.pop(name))

    def bookmark(self) -> None:
        self._say("BOOKMARK", {"metadata": {"labels": {}}})

    def compact(self) -> None:
        """All versions up to now are forgotten, and whoever watches is cut off."""
        self.version += 1
        self.oldest = self.version
        self.cut()

    def cut(self) -> None:
        self._cut.set()
        self._cut = asyncio.Event()

    def _say(self, kind: str, item: Object) -> None:
        self.version += 1
        item["metadata"]["resourceVersion"] = str(self.version)
        self._history.append((self.version, kind, json.loads(json.dumps(item))))
        self._changed.set()
        self._changed = asyncio.Event()

    def _fits(self, item: Object, selector: str) -> bool:
        labels = item["metadata"].get("labels", {})
        wanted = dict(each.split("=") for each in selector.split(",") if each)
        return all(labels.get(key) == value for key, value in wanted.items())

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if self.status:
            said = {"kind": "Status", "code": self.status, "message": f"status {self.status}"}
            return web.json_response(said, status=self.status)
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.json_response({"code": 401, "message": "Unauthorized"}, status=401)
        if request.query.get("watch"):
            return await self._watch(request)
        if self.forgets == "list" and "continue" in request.query:
            return web.json_response(
                {"code": 410, "message": "the continue parameter is too old"}, status=410
            )
        self.lists += 1
        fitting = [
            item for _, item in sorted(self.pods.items()) if self._fits(item, request.query["labelSelector"])
        ]
        begin, limit = int(request.query.get("continue", "0")), int(request.query["limit"])
        page = {"metadata": {"resourceVersion": str(self.version)}, "items": fitting[begin : begin + limit]}
        if begin + limit < len(fitting) or self.forgets == "list":
            page["metadata"]["continue"] = str(begin + limit)  # type: ignore[index]
        return web.json_response({"kind": "PodList", **page})

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        self.watches += 1
        seen, cut = int(request.query["resourceVersion"]), self._cut
        if seen < self.oldest or self.forgets == "watch":
            return web.json_response({"code": 410, "message": "too old"}, status=410)
        answer = web.StreamResponse()
        await answer.prepare(request)
        if self.forgets == "line":
            said = {"type": "ERROR", "object": {"code": 410, "message": "too old resource version"}}
            await answer.write(json.dumps(said).encode() + b"\n")
            return answer
        end_s = asyncio.get_running_loop().time() + self.watch_s
        while not cut.is_set() and not self._ended and asyncio.get_running_loop().time() < end_s:
            changed = self._changed
            for version, kind, item in self._history:
                fits = kind == "BOOKMARK" or self._fits(item, request.query["labelSelector"])
                if version > seen and fits:
                    await answer.write(json.dumps({"type": kind, "object": item}).encode() + b"\n")
            seen = self.version
            waiting = [asyncio.ensure_future(each.wait()) for each in (changed, cut)]
            await asyncio.wait(
                waiting,
                timeout=end_s - asyncio.get_running_loop().time(),
                return_when=asyncio.FIRST_COMPLETED,
            )
            for each in waiting:
                each.cancel()
        return answer

    def end(self) -> None:
        self._ended = True
        self._changed.set()


@asynccontextmanager
async def kubernetes(namespace: str = "prod", port: int = 0) -> AsyncIterator[Kubernetes]:
    made, app = Kubernetes(), web.Application()
    path = "/api/v1/pods" if namespace == "*" else f"/api/v1/namespaces/{namespace}/pods"
    app.router.add_get(path, made.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.01)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield made
    finally:
        made.end()
        await runner.cleanup()
