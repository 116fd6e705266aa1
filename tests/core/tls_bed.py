"""Certificates and settings for tests with TLS of control connections."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from moonpool.core.config import config
from moonpool.core.config.config import Config

CERTIFICATES = Path(__file__).parent / "certificates"


@pytest.fixture
def pem(tmp_path: Path) -> Callable[[str], str]:
    """The path of a certificate of the tests; the key is private, as git does not keep it."""
    shutil.copytree(CERTIFICATES, tmp_path / "pem")
    (tmp_path / "pem" / "test-key.pem").chmod(0o600)
    return lambda name: str(tmp_path / "pem" / f"{name}.pem")


@pytest.fixture
def control(pem: Callable[[str], str]) -> dict[str, str]:
    """[cluster] of a master and of who dials it, without mutual proof."""
    return {
        "tls_control": "on",
        "tls_cert": pem("master"),
        "tls_key": pem("test-key"),
        "tls_ca": pem("authority"),
    }


def made(cluster: dict[str, str]) -> Config:
    return config.load(env={}, arguments={f"cluster.{name}": value for name, value in cluster.items()})


def variables(cluster: dict[str, str]) -> dict[str, str]:
    return {f"MOONPOOL_CLUSTER_{name.upper()}": value for name, value in cluster.items()}
