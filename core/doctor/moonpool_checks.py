"""The configuration, the runtime folder, the token and the files of keys."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

from moonpool.core.config import paths
from moonpool.core.config.cluster_token import TOKEN_BYTES_GOOD, secrets_of
from moonpool.core.config.config import Config
from moonpool.core.doctor.finding import Finding, absent, broken, weak, works
from moonpool.core.errors import ConfigError

FREE_BYTES_MIN = 1 << 20


def check(config: Config | ConfigError) -> Iterator[Finding]:
    """All checks of this file. config: or why it cannot be read."""
    if isinstance(config, ConfigError):
        yield broken("configuration", str(config), "moonpool config show; docs/configuration.md")
    else:
        yield works("configuration", "it can be read")
    yield from _runtime_folder()
    if not isinstance(config, ConfigError):
        yield from _token(config)
        yield from _key_files(config)


def _key_files(config: Config) -> Iterator[Finding]:
    """Those that are configured: whether this user reads them, and no other."""
    files = {
        "cluster.admin_token_file": config.cluster.admin_token_file,
        "cluster.tenants_file": config.cluster.tenants_file,
        "cluster.tenant_key_file": config.cluster.tenant_key_file,
        "proxy.api_keys_file": config.proxy.api_keys_file,
        "proxy.clients_file": config.proxy.clients_file,
        "proxy.discovery_keys_file": config.proxy.discovery_keys_file,
        "proxy.engine_key_file": config.proxy.engine_key_file,
    }
    for key, file in files.items():
        if not file:
            continue
        try:
            with open(file, "rb") as opened:
                mode = stat.S_IMODE(os.fstat(opened.fileno()).st_mode)
        except OSError as error:
            remedy = f"make {file}, readable for this user alone, or set {key} to another file"
            yield broken(f"file {key}", f"{key} = {file} cannot be read: {error.strerror}", remedy)
            continue
        if mode & 0o077:
            what = f"{key} = {file} can be read by other users (mode {mode:04o})"
            yield weak(f"file {key}", what, f"chmod 600 {file}")
        else:
            yield works(f"file {key}", f"{file} can be read by this user alone")


def _runtime_folder() -> Iterator[Finding]:
    remedy = f"set {paths.RUNTIME_DIR_VARIABLE} to a folder of yours with mode 0700"
    try:
        folder = paths.runtime_dir(ensure=True)
        space = os.statvfs(folder)
    except ConfigError as error:
        yield broken("runtime folder", str(error), remedy)
        return
    except OSError as error:
        yield broken("runtime folder", f"it cannot be looked at: {error}", remedy)
        return
    is_read_only = bool(space.f_flag & os.ST_RDONLY)
    if is_read_only or not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
        yield broken("runtime folder", f"{folder} cannot be written", remedy)
    elif space.f_blocks and space.f_bavail * space.f_frsize < FREE_BYTES_MIN:
        yield broken("runtime folder", f"the disk of {folder} is full", f"make room there, or {remedy}")
    else:
        yield works("runtime folder", f"{folder}")


def _token(config: Config) -> Iterator[Finding]:
    try:
        configured = config.token_is_configured
        if not configured and not (paths.runtime_dir() / "token").exists():
            yield absent(
                "token",
                f"none is configured: the first process of this user makes one for this host; other hosts "
                f"need {paths.TOKEN_FILE_VARIABLE}",
            )
            return
        token = config.read_token()
    except ConfigError as error:
        yield broken(
            "token",
            str(error),
            "openssl rand -hex 32 > token; chmod 600 token; the same file on each host, named by "
            f"{paths.TOKEN_FILE_VARIABLE}",
        )
        return
    if len(token) < TOKEN_BYTES_GOOD:
        what = f"the token has {len(token)} bytes: it can be guessed, and is refused beyond loopback"
        yield weak("token", what, "openssl rand -hex 32")
    elif len(secrets_of(token)) > 1:
        what = "the token file holds two secrets: the first is proved, both are believed"
        yield works("token", f"{what}; take the old one out when all hosts have the new one first")
    elif configured:
        yield works("token", "a token is configured")
    else:
        yield works("token", "that of this user and host; other hosts need a configured one")
