"""Paths of an engine that are its operator's: none is relayed, however it is written."""

from __future__ import annotations

import json

import pytest

from tests.disagg_proxy.harness import bed, with_deadline
from tests.hostile.operators_paths import DOTS, OPERATORS


@with_deadline
@pytest.mark.parametrize("method", ["POST", "GET"])
async def test_no_operators_path_is_relayed(method: str) -> None:
    async with bed(1) as b:
        for path in OPERATORS:
            answer = await b.ask(method, path, b'{"lora_path":"/etc"}')
            assert answer.status == 404, path
            assert "proxy.relay_paths" in json.loads(answer.body)["error"]["message"]
        for path in DOTS:
            answer = await b.ask(method, path, b"{}")
            assert (answer.status, json.loads(answer.body)["error"]["code"]) == (400, "dot_segment"), path
        assert not b.engines[0].seen


@with_deadline
async def test_the_operator_adds_paths() -> None:
    form = b'--x\r\nContent-Disposition: form-data; name="file"\r\n\r\n...\r\n--x--\r\n'
    multipart = "Content-Type: multipart/form-data; boundary=x\r\n"
    async with bed(1, relay_paths=("/v1/audio/*", "/v1/load_lora_adapter")) as b:
        assert (await b.ask("POST", "/v1/audio/transcriptions", form, multipart)).status == 200
        assert b.engines[0].seen[-1].body == form
        assert (await b.ask("POST", "/v1/load_lora_adapter", b'{"rid":1,"a":2}')).status == 200
        assert b.engines[0].seen[-1].body == b'{"a":2}'
        assert (await b.ask("POST", "/v1/load_lora_adapter", b"form?")).status == 400
        for path in ("/v1/audio/", "/v1/audio", "/v1/load_lora_adapter/x", "/v1/unload_lora_adapter"):
            assert (await b.ask("POST", path, b"{}")).status == 404
        assert (await b.ask("POST", "/v1/audio/../load_lora_adapter", b"{}")).status == 400
        assert (await b.ask("POST", "/v1/completions", form, multipart)).status == 400
        assert len(b.engines[0].seen) == 2
