"""MooncakeConfig: files, variables, what a constructor checks. The tables are what the original answers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from mooncake.mooncake_config import MooncakeConfig, _parse_bool, _parse_segment_size

GIVEN: dict[str, Any] = {
    "local_hostname": "h",
    "metadata_server": "P2PHANDSHAKE",
    "master_server_address": "m:1",
}
DEFAULTS = {
    "global_segment_size": 3355443200,
    "local_buffer_size": 1073741824,
    "protocol": "tcp",
    "device_name": "",
    "enable_ssd_offload": False,
    "ssd_offload_path": "",
    "tenant_id": "default",
    "enable_client_http_server": False,
    "client_http_port": 9300,
}
GIB = 1 << 30
SIZES = [
    ("1", 1), ("1.5", 1), (5.5, 5), (-3, -3), ("-1", -1), (True, 1), ("1gb", GIB), ("1 GB", GIB),
    ("1.5gb", 3 * GIB // 2), ("1g", GIB), ("512MB", GIB // 2), ("1k", 1024), ("1kb", 1024), ("1b", 1),
    ("1e3", 1000), ("1TB", GIB << 10), ("0.5mb", 1 << 19), (" 7 ", 7), ("9007199254740993", 9007199254740993),
]  # fmt: skip
NO_SIZES = ["", "  ", "abc", "gb", "1gib", "nan", None, []]
FLAGS = [
    ("true", True), (" yes ", True), ("1", True), ("ON", True), ("enable", True), (2, True), (1.0, True),
    ("false", False), ("no", False), ("off", False), ("0", False), ("Disable", False), ("", False),
    (None, False), (0, False),
]  # fmt: skip
NO_FLAGS = ["t", "2", "-1", b"1", [], "enabled", "y", "maybe"]


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("MOONCAKE_")]:
        monkeypatch.delenv(name)


def test_sizes_and_flags() -> None:
    assert [(text, _parse_segment_size(text)) for text, _ in SIZES] == SIZES
    for text in NO_SIZES:
        with pytest.raises((ValueError, TypeError)):
            _parse_segment_size(text)
    assert [(text, _parse_bool(text)) for text, _ in FLAGS] == FLAGS
    for text in NO_FLAGS:
        with pytest.raises(ValueError, match="boolean"):
            _parse_bool(text)


@pytest.mark.parametrize(
    ("variable", "text", "field", "value"),
    [
        ("LOCAL_HOSTNAME", "hh", "local_hostname", "hh"),
        ("TE_META_DATA_SERVER", "http://x", "metadata_server", "http://x"),
        ("GLOBAL_SEGMENT_SIZE", "4gb", "global_segment_size", 4 * GIB),
        ("LOCAL_BUFFER_SIZE", "2gb", "local_buffer_size", 2 * GIB),
        ("PROTOCOL", "RDMA", "protocol", "rdma"),
        ("DEVICE", "d", "device_name", "d"),
        ("OFFLOAD_ENABLED", "enable", "enable_ssd_offload", True),
        ("OFFLOAD_FILE_STORAGE_PATH", "/p", "ssd_offload_path", "/p"),
        ("TENANT_ID", "t", "tenant_id", "t"),
        ("ENABLE_CLIENT_HTTP_SERVER", "true", "enable_client_http_server", True),
        ("CLIENT_HTTP_PORT", "19300", "client_http_port", 19300),
    ],
)
def test_variables(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str, field: str, value: object
) -> None:
    with pytest.raises(ValueError, match="MOONCAKE_MASTER"):
        MooncakeConfig.load_from_env()
    monkeypatch.setenv("MOONCAKE_MASTER", "m:1")
    plain = {**GIVEN, "local_hostname": "localhost"} | DEFAULTS
    assert vars(MooncakeConfig.load_from_env()) == plain
    monkeypatch.setenv(f"MOONCAKE_{variable}", text)
    assert vars(MooncakeConfig.load_from_env()) == plain | {field: value}


@pytest.mark.parametrize(
    ("variable", "text", "word"),
    [
        ("GLOBAL_SEGMENT_SIZE", "", "size"),
        ("GLOBAL_SEGMENT_SIZE", "-1", "global_segment_size"),
        ("PROTOCOL", "", "protocol"),
        ("OFFLOAD_ENABLED", "maybe", "boolean"),
        ("CLIENT_HTTP_PORT", "x", "'x'"),
        ("LOCAL_HOSTNAME", "", "local_hostname"),
    ],
)
def test_variables_that_cannot_be_meant(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str, word: str
) -> None:
    monkeypatch.setenv("MOONCAKE_MASTER", "m:1")
    monkeypatch.setenv(f"MOONCAKE_{variable}", text)
    with pytest.raises(ValueError, match=word):
        MooncakeConfig.load_from_env()


def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "c.json"

    def read(**more: Any) -> MooncakeConfig:
        rows = {name: value for name, value in (GIVEN | more).items() if value != "left out"}
        file.write_text(json.dumps(rows))
        return MooncakeConfig.from_file(str(file))

    assert vars(read(unknown=1)) == GIVEN | DEFAULTS
    for field, text, value in (
        ("tenant_id", None, "default"),
        ("tenant_id", 5, "5"),
        ("ssd_offload_path", None, ""),
        ("enable_ssd_offload", "disable", False),
        ("protocol", "TCP", "tcp"),
        ("protocol", "nonsense", "nonsense"),
        ("global_segment_size", "1.5", 1),
        ("global_segment_size", 0, 0),
        ("device_name", None, None),
        ("client_http_port", "9301", 9301),
    ):
        assert vars(read(**{field: text})) == GIVEN | DEFAULTS | {field: value}
    for name in GIVEN:
        for bad in ("", " ", None, 5):
            with pytest.raises(ValueError, match=f"'{name}' must be a non-empty string"):
                read(**{name: bad})
        with pytest.raises(ValueError, match=f"Missing required config field: {name}"):
            read(**{name: "left out"})
    for field, bad in (
        ("protocol", ""), ("protocol", None), ("protocol", 5), ("global_segment_size", -1),
        ("local_buffer_size", "x"), ("enable_ssd_offload", "maybe"), ("client_http_port", "x"),
    ):  # fmt: skip
        with pytest.raises(ValueError):
            read(**{field: bad})
    with pytest.raises(TypeError):
        read(global_segment_size=None)
    read(protocol="rdma")
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(file))
    monkeypatch.setenv("MOONCAKE_PROTOCOL", "tcp")
    assert MooncakeConfig.load_from_env().protocol == "rdma"
    with pytest.raises(FileNotFoundError):
        MooncakeConfig.from_file(str(tmp_path / "none"))


def test_what_the_constructor_checks() -> None:
    good = GIVEN | DEFAULTS
    assert MooncakeConfig(**good | {"protocol": " RDMA "}).protocol == "rdma"
    for field, bad in (
        *((name, bad) for name in GIVEN for bad in ("", "  ", None, 5)),
        ("protocol", ""), ("protocol", None), ("global_segment_size", -1), ("local_buffer_size", -1),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=field):
            MooncakeConfig(**good | {field: bad})
