"""Tracks conflicts of bootstrap pages: several prefill engines with one page address, and pages at loopback
addresses while decode engines may be on other hosts.

The state is incremental, so that each join costs the same, however many engines there are. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

from moonpool.core.service.addresses import Address
from moonpool.disagg_proxy.settings import EngineSpec

Page = tuple[str, int]  # host and port


class BootstrapConflicts:
    """All engines of the fleet, by name."""

    def __init__(self, specs: Iterable[EngineSpec] = ()) -> None:
        self._specs: dict[str, EngineSpec] = {}
        self._at: dict[Page, set[str]] = {}  # names of the prefill engines with their page there
        self._far: dict[str, EngineSpec] = {}  # decode-capable engines that may be on another host
        for spec in specs:
            self.add(spec)

    @property
    def pages(self) -> Set[Page]:
        """Page addresses of all engines, a live view."""
        return self._at.keys()

    def add(self, spec: EngineSpec) -> Set[str]:
        """Adds or replaces an engine. Returns the names of engines whose pages may have become unusable."""
        changed = self.remove(spec.name)
        self._specs[spec.name] = spec
        page = spec.bootstrap_address
        if page is not None:
            there = self._at.setdefault(page, set())
            there.add(spec.name)
            if len(there) == 2:
                changed |= there
        if spec.role == "prefill" or Address(*spec.address).is_loopback:
            return changed
        self._far[spec.name] = spec
        return changed | self._near() if len(self._far) == 1 else changed

    def remove(self, name: str) -> Set[str]:
        """Removes an engine, if present. Returns the names of engines whose pages may have become usable."""
        spec = self._specs.pop(name, None)
        if spec is None:
            return frozenset()
        changed: Set[str] = frozenset()
        page = spec.bootstrap_address
        if page is not None:
            there = self._at[page]
            there.remove(name)
            if len(there) == 1:
                changed = frozenset(there)
            if not there:
                del self._at[page]
        was_last = self._far.pop(name, None) is not None and not self._far
        return changed | self._near() if was_last else changed

    def is_shared(self, page: Page) -> bool:
        """Whether several engines have their page there, so that its owner is unknown."""
        return len(self._at.get(page, ())) > 1

    def cut_off(self, page: Page) -> EngineSpec | None:
        """A decode-capable engine that may be on another host while the page is at a loopback address; None:
        there is none."""
        return next(iter(self._far.values()), None) if Address(*page).is_loopback else None

    def _near(self) -> Set[str]:
        """Names of engines whose page is at a loopback address."""
        return {name for page, names in self._at.items() if Address(*page).is_loopback for name in names}
