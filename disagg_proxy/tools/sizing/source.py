"""Finds a model's config.json: a file, a folder, or a name on the Hugging Face Hub, of which a copy that was
downloaded before is taken first."""

from __future__ import annotations

import json
import os
import re
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from moonpool.core.errors import ConfigError, Unavailable

HUB = "https://huggingface.co"
HUB_NAME = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}", re.ASCII)
CONFIG_BYTES_MAX = 4 << 20
DOWNLOAD_S = 15.0


def read_config(model: str) -> dict[str, Any]:
    """model: a config.json, a folder with one, or ORGANISATION/NAME. Raises ConfigError for a model that is
    not there or whose file is none, Unavailable when the Hub cannot be reached."""
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise _bad(f"the folder {model} has no config.json")
        path /= "config.json"
    if path.is_file():
        try:
            with path.open("rb") as file:
                return _parse(file.read(CONFIG_BYTES_MAX + 1), model)
        except OSError as error:
            raise _bad(f"{path} cannot be read: {error}") from error
    if not HUB_NAME.fullmatch(model) or ".." in model:
        raise _bad(
            f"{model} is no file or folder, and no name on the Hub; give a config.json, a model's folder or "
            f"ORGANISATION/NAME"
        )
    kept = _downloaded(model)
    if kept is not None:
        return _parse(kept.read_bytes(), str(kept))
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        raise _bad(f"{model} was not downloaded before, and HF_HUB_OFFLINE is set; give its config.json")
    return _parse(_download(model), model)


def _downloaded(model: str) -> Path | None:
    """The cache folder of the Hub's own tools."""
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    cache = Path(os.environ.get("HF_HUB_CACHE") or f"{home}/hub").expanduser()
    kept = cache / ("models--" + model.replace("/", "--"))
    try:
        latest = kept / "snapshots" / (kept / "refs" / "main").read_text().strip() / "config.json"
        return latest if latest.is_file() else None
    except (OSError, UnicodeDecodeError):
        return None


def _download(model: str) -> bytes:
    hub = (os.environ.get("HF_ENDPOINT") or HUB).rstrip("/")
    url = f"{hub}/{model}/resolve/main/config.json"
    request = urllib.request.Request(url, headers={"User-Agent": "moonpool"})
    token = os.environ.get("HF_TOKEN")
    if token:
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=DOWNLOAD_S) as answer:
            return bytes(answer.read(CONFIG_BYTES_MAX + 1))
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            what = (
                f"the Hub does not show {model} (it says {error.code}): no such model, or HF_TOKEN is needed"
            )
            raise _bad(what) from error
        if error.code == 404:
            raise _bad(f"there is no {model} with a config.json on the Hub") from error
        what = f"the Hub answered {error.code} for {model}; give its config.json instead"
        raise Unavailable(what, operation="plan", peer=hub) from error
    except (OSError, ValueError) as error:
        why = getattr(error, "reason", error)
        what = f"{hub} cannot be reached ({why}); give the model's config.json or folder instead"
        raise Unavailable(what, operation="plan", peer=hub) from error


def _parse(text: bytes, name: str) -> dict[str, Any]:
    if len(text) > CONFIG_BYTES_MAX:
        raise _bad(f"the config.json of {name} is larger than {CONFIG_BYTES_MAX >> 20} MiB")
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _bad(f"the config.json of {name} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise _bad(f"the config.json of {name} is no JSON object")
    return config


def _bad(sentence: str) -> ConfigError:
    return ConfigError(sentence, operation="plan", key="model")
