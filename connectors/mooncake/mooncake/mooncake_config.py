"""``MooncakeConfig``: settings that programs read from a JSON file or the environment, for setup()."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

from ._access import size_of

DEFAULT_GLOBAL_SEGMENT_SIZE = 3_355_443_200
DEFAULT_LOCAL_BUFFER_SIZE = 1_073_741_824
REQUIRED = ("local_hostname", "metadata_server", "master_server_address")
ON, OFF = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


@dataclass
class MooncakeConfig:
    """Sizes in bytes."""

    local_hostname: str
    metadata_server: str
    global_segment_size: int
    local_buffer_size: int
    protocol: str
    device_name: str | None
    master_server_address: str
    enable_ssd_offload: bool = False
    ssd_offload_path: str = ""
    tenant_id: str = "default"
    enable_client_http_server: bool = False
    client_http_port: int = 9300

    @staticmethod
    def from_file(file_path: str) -> MooncakeConfig:
        """Raises OSError or JSONDecodeError, and ValueError for a field that is missing or malformed."""
        with open(file_path) as file:
            return _config(json.load(file))

    @staticmethod
    def load_from_env() -> MooncakeConfig:
        """The file MOONCAKE_CONFIG_PATH, else MOONCAKE_MASTER and other variables; ValueError without."""
        if path := os.environ.get("MOONCAKE_CONFIG_PATH"):
            return MooncakeConfig.from_file(path)
        if not os.environ.get("MOONCAKE_MASTER"):
            raise ValueError(
                "Neither the environment variable 'MOONCAKE_CONFIG_PATH' nor 'MOONCAKE_MASTER' is set."
            )
        given = {
            name: os.environ[variable] for name, variable in _VARIABLES.items() if variable in os.environ
        }
        return _config({"local_hostname": "localhost", "metadata_server": "P2PHANDSHAKE"} | given)


_VARIABLES = {
    "local_hostname": "MOONCAKE_LOCAL_HOSTNAME",
    "metadata_server": "MOONCAKE_TE_META_DATA_SERVER",
    "global_segment_size": "MOONCAKE_GLOBAL_SEGMENT_SIZE",
    "local_buffer_size": "MOONCAKE_LOCAL_BUFFER_SIZE",
    "protocol": "MOONCAKE_PROTOCOL",
    "device_name": "MOONCAKE_DEVICE",
    "master_server_address": "MOONCAKE_MASTER",
    "enable_ssd_offload": "MOONCAKE_ENABLE_SSD_OFFLOAD",
    "ssd_offload_path": "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH",
    "tenant_id": "MOONCAKE_TENANT_ID",
}


def _config(given: dict[str, Any]) -> MooncakeConfig:
    for name in REQUIRED:
        if not given.get(name):
            raise ValueError(f"Missing required config field: {name}")
    return MooncakeConfig(
        local_hostname=given["local_hostname"],
        metadata_server=given["metadata_server"],
        global_segment_size=_size(given, "global_segment_size", DEFAULT_GLOBAL_SEGMENT_SIZE),
        local_buffer_size=_size(given, "local_buffer_size", DEFAULT_LOCAL_BUFFER_SIZE),
        protocol=given.get("protocol", "tcp"),
        device_name=given.get("device_name", ""),
        master_server_address=given["master_server_address"],
        enable_ssd_offload=_flag(given.get("enable_ssd_offload", False)),
        ssd_offload_path=given.get("ssd_offload_path", ""),
        tenant_id=given.get("tenant_id", "default"),
        enable_client_http_server=_flag(given.get("enable_client_http_server", False)),
        client_http_port=int(given.get("client_http_port", 9300)),
    )


def _size(given: dict[str, Any], name: str, default: int) -> int:
    return size_of(given.get(name, default), name)


def _flag(value: Any) -> bool:
    text = "" if value is None else str(value).strip().lower()
    if text in ON:
        return True
    if text in OFF:
        return False
    raise ValueError(f"Invalid boolean value: {value!r}")
