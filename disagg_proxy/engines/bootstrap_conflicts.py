"""What of the other engines matters to a prefill engine's bootstrap page: which others have their page
there, and which would be told to meet it at an address that this host alone has.

Kept rather than looked for, so that each engine joins at the same cost, however many there are. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

from moonpool.core.service.addresses import Address
from moonpool.disagg_proxy.settings import EngineSpec

Page = tuple[str, int]  # host and port


class BootstrapConflicts:
    """All engines that are there, by name."""

    def __init__(self, specs: Iterable[EngineSpec] = ()) -> None:
        self._specs: dict[str, EngineSpec] = {}
        self._at: dict[Page, set[str]] = {}  # prefill engines whose page is there
        self._far: dict[str, EngineSpec] = {}  # they answer, and may be on another machine than this one
        for spec in specs:
            self.add(spec)

    @property
    def pages(self) -> Set[Page]:
        """Of all engines. Follows engines that come and go."""
        return self._at.keys()

    def add(self, spec: EngineSpec) -> Set[str]:
        """Instead of the one of its name. Returns whose page may be usable no longer."""
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
        """Nothing, when there is none. Returns whose page may be usable now."""
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
        """Whether it stands for several engines: it is not known whose it is."""
        return len(self._at.get(page, ())) > 1

    def cut_off(self, page: Page) -> EngineSpec | None:
        """An engine that answers, and may be on another machine than this one, where alone the page is."""
        return next(iter(self._far.values()), None) if Address(*page).is_loopback else None

    def _near(self) -> Set[str]:
        """Engines whose page is on this host alone."""
        return {name for page, names in self._at.items() if Address(*page).is_loopback for name in names}
