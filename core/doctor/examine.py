"""All checks, in order."""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec

from moonpool.core.config.config import Config
from moonpool.core.doctor import (
    cluster_checks,
    gpu_checks,
    moonpool_checks,
    port_checks,
    rdma_checks,
    system_checks,
    tls_checks,
)
from moonpool.core.doctor.finding import Finding, State, absent, weak, works
from moonpool.core.doctor.host import Host
from moonpool.core.doctor.peer import Peer, examine_peer
from moonpool.core.errors import ConfigError, Error
from moonpool.core.service.data_tls import EngineTls
from moonpool.core.transfer.engine import TransferEngine


class Report(msgspec.Struct, frozen=True):
    """findings: of this machine. peer: None when no peer was named."""

    findings: list[Finding]
    peer: Peer | None
    seconds: float

    @property
    def is_broken(self) -> bool:
        """Whether anything of this machine is."""
        return any(finding.state is State.BROKEN for finding in self.findings)

    @property
    def peer_is_broken(self) -> bool:
        """Whether anything of the peer is."""
        found = self.peer.findings if self.peer else []
        return any(finding.state is State.BROKEN for finding in found)


def examine(host: Host, config: Config | ConfigError, peer: str = "") -> Report:
    """Examines this machine, and the peer at "host:port" unless it is "".

    config: or why it cannot be read, which is then a finding; no peer is asked without it.
    """
    began_s = time.monotonic()
    findings = [
        *moonpool_checks.check(config),
        *_of_configuration(host, config),
        *system_checks.check(host),
        *rdma_checks.check(host),
        *gpu_checks.check(host),
        *_transports(),
    ]
    examined = None
    if peer and isinstance(config, Config):
        examined = examine_peer(peer, config, has_card=bool(gpu_checks.cards(host)))
    return Report(findings, examined, time.monotonic() - began_s)


def _of_configuration(host: Host, config: Config | ConfigError) -> Iterator[Finding]:
    if isinstance(config, Config):
        yield from tls_checks.check(host, config)
        yield from port_checks.check(config)
        yield from cluster_checks.check(host, config)


def _transports() -> Iterator[Finding]:
    """As an engine that is made here says of itself, each with its own reason."""
    try:
        with TransferEngine("doctor", listen=None, token=b"of no peer", tls=EngineTls()) as engine:
            for name, why in engine.transports().items():
                if why:
                    yield absent(f"transport {name}", why)
                else:
                    yield works(f"transport {name}", "it works on this host")
    except Error as error:
        yield weak("transports", f"no engine can be made here: {error}", "see the checks above")
