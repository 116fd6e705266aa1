"""Paths of an engine that are its operator's, and ways to write them so that a proxy might not see it."""

from __future__ import annotations

OPERATORS = [
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/load_lora_adapter",
    "/sleep",
    "/wake_up",
    "/collective_rpc",
    "/reset_prefix_cache",
    "/flush_cache",
    "/update_weights_from_disk",
    "/start_profile",
    "/abort_request",
    "/server_info",
    "/v1/files",
    "/v1/audio/transcriptions",
    "//v1/completions",
    "/V1/completions",
    "/v1/completions/",
    "/v1/completions%2f",
    "/v1/%63ompletions",
]
DOTS = [
    "/v1/../metrics",
    "/v1/%2e%2e/%2E%2e/reset",
    "/v1/models/../load_lora_adapter",
    "/v1/models/.%2e/x",
    "/v1/models/..%2fload_lora_adapter",
    "/v1/models/..\\load_lora_adapter",
    "/v1/models/%2e%2e%5cx",
    "/v1/./completions",
    "/v1/models/..",
]
