"""``MooncakeConfig``: settings that programs read from a JSON file or the environment, for setup()."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

from ._access import OFF, ON

DEFAULT_GLOBAL_SEGMENT_SIZE = 3_355_443_200
DEFAULT_LOCAL_BUFFER_SIZE = 1_073_741_824
REQUIRED = ("local_hostname", "metadata_server", "master_server_address")
SIZES = ("global_segment_size", "local_buffer_size")
_UNITS = {"kb": 10, "mb": 20, "gb": 30, "tb": 40, "k": 10, "m": 20, "g": 30, "t": 40, "b": 0}


@dataclass
class MooncakeConfig:
    """Sizes in bytes. The protocol is kept in small letters. Raises ValueError for an invalid value."""

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

    def __post_init__(self) -> None:
        for name in REQUIRED:
            value = getattr(self, name)
            if not isinstance(value, str) or not value.strip():
                raise ValueError(f"Config field '{name}' must be a non-empty string, got {value!r:.80}.")
        if not isinstance(self.protocol, str) or not self.protocol.strip():
            raise ValueError(
                f"Invalid protocol: {self.protocol!r:.80}. It must be a non-empty string, such as 'tcp'."
            )
        self.protocol = self.protocol.strip().lower()
        for name in SIZES:
            if getattr(self, name) < 0:
                raise ValueError(f"Invalid {name}: {getattr(self, name)}. Size must be non-negative.")

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
    "enable_ssd_offload": "MOONCAKE_OFFLOAD_ENABLED",
    "ssd_offload_path": "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH",
    "tenant_id": "MOONCAKE_TENANT_ID",
    "enable_client_http_server": "MOONCAKE_ENABLE_CLIENT_HTTP_SERVER",
    "client_http_port": "MOONCAKE_CLIENT_HTTP_PORT",
}


def _config(given: dict[str, Any]) -> MooncakeConfig:
    for name in REQUIRED:
        if name not in given:
            raise ValueError(f"Missing required config field: {name}")
    return MooncakeConfig(
        local_hostname=given["local_hostname"],
        metadata_server=given["metadata_server"],
        global_segment_size=_parse_segment_size(
            given.get("global_segment_size", DEFAULT_GLOBAL_SEGMENT_SIZE)
        ),
        local_buffer_size=_parse_segment_size(given.get("local_buffer_size", DEFAULT_LOCAL_BUFFER_SIZE)),
        protocol=given.get("protocol", "tcp"),
        device_name=given.get("device_name", ""),
        master_server_address=given["master_server_address"],
        enable_ssd_offload=_parse_bool(given.get("enable_ssd_offload", False)),
        ssd_offload_path=_text(given.get("ssd_offload_path"), ""),
        tenant_id=_text(given.get("tenant_id"), "default"),
        enable_client_http_server=_parse_bool(given.get("enable_client_http_server", False)),
        client_http_port=int(given.get("client_http_port", 9300)),
    )


def _text(value: Any, instead_of_null: str) -> str:
    return instead_of_null if value is None else str(value)


def _parse_segment_size(value: Any) -> int:
    """Bytes: a number, or text such as "4gb", which is 4 * 2**30, with parts of a byte cut off. ValueError or
    TypeError for anything else.
    """
    if not isinstance(value, str):
        return int(value)
    text = value.strip().lower()
    if not text:
        raise ValueError("Invalid segment size: empty string")
    unit = next((unit for unit in _UNITS if text.endswith(unit)), "")
    number = text.removesuffix(unit).strip()
    if not number:
        raise ValueError(f"Invalid segment size: missing number before {unit!r}")
    try:
        return int(number) << _UNITS.get(unit, 0)
    except ValueError:
        return int(float(number) * (1 << _UNITS.get(unit, 0)))


def _parse_bool(value: Any) -> bool:
    if value is None or isinstance(value, (bool, int, float)):
        return bool(value)
    text = value.strip().lower() if isinstance(value, str) else None
    if text in ON:
        return True
    if text in OFF:
        return False
    raise ValueError(f"Invalid boolean value: {value!r:.80}")
