"""Strangers: what a peer without a key, a client with one, or an engine that lies can do to a process.

Each file is one scenario. Its short form runs always; the long form, with the sizes of a real attack, is
marked ``heavy``. Times and memory under attack are figures of ``benchmarks/hostile/``; here is asserted
what must hold on any machine: who is served, who is refused with which reason, what reaches an engine.
"""

from __future__ import annotations

from tests.disagg_proxy.conftest import _metrics_are_made_anew

__all__ = ["_metrics_are_made_anew"]
