"""What keeps this machine from moving bytes well, in sentences with a remedy each: `moonpool doctor`.

    finding.py          Finding: one answer of one check
    host.py             Host: all that the checks look at, so that tests plant faults
    system_checks.py    limits, shared memory, system calls, clock
    rdma_checks.py      NICs, ports, GIDs, MTU, libibverbs and its device nodes
    gpu_checks.py       GPUs, the driver's library, its device nodes
    moonpool_checks.py  the configuration, the runtime folder, the token, files of keys
    tls_checks.py       certificates, their key, the authorities
    port_checks.py      the addresses to listen on
    cluster_checks.py   clocks and versions of the masters and of this host's node
    peer.py             one peer: whether it is reached, by which path, how fast
    examine.py          all of it, in order, and what the transports say of themselves

Checks only look: nothing is installed, mounted or configured, and no file is made but the runtime folder and,
with a peer, this user's token where none is configured.
"""

from moonpool.core.doctor.examine import Report, examine
from moonpool.core.doctor.finding import Finding, State
from moonpool.core.doctor.host import Host

__all__ = ["Finding", "Host", "Report", "State", "examine"]
