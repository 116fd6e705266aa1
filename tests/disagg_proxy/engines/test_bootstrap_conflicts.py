"""What matters of other engines to a bootstrap page, beside a slow version that looks at all of them."""

from __future__ import annotations

import random

from moonpool.core.service.addresses import Address
from moonpool.disagg_proxy.engines.bootstrap_conflicts import BootstrapConflicts
from moonpool.disagg_proxy.settings import EngineSpec, shared_bootstraps

PREFILL = [
    EngineSpec(f"p{n}", f"http://{host}:{n + 1}", "prefill", page)
    for n, (host, page) in enumerate(
        [("127.0.0.1", "9000"), ("127.0.0.1", "9000"), ("10.0.0.1", ""), ("10.0.0.1", ""), ("localhost", "0")]
    )
]
OTHERS = [
    EngineSpec("near", "http://localhost:50", "decode"),
    EngineSpec("far", "http://10.0.0.9:50", "decode"),
    EngineSpec("farther", "http://10.0.0.10:50"),
]


def usable(specs: dict[str, EngineSpec]) -> set[str]:
    shared = shared_bootstraps(specs.values())
    far = any(each.role != "prefill" and not Address(*each.address).is_loopback for each in specs.values())
    return {
        name
        for name, spec in specs.items()
        if (page := spec.bootstrap_address) is not None
        and page not in shared
        and not (far and Address(*page).is_loopback)
    }


def test_who_comes_and_goes_changes_what_a_slow_version_sees(rng: random.Random) -> None:
    conflicts, there = BootstrapConflicts(), dict[str, EngineSpec]()
    for _ in range(2_000):
        spec, before = rng.choice(PREFILL + OTHERS), usable(there)
        if spec.name in there and rng.random() < 0.8:
            del there[spec.name]
            changed = conflicts.remove(spec.name)
        else:  # at times it is there already
            there[spec.name] = spec
            changed = conflicts.add(spec)
        after = usable(there)
        assert (before ^ after) - {spec.name} <= changed
        assert conflicts.pages == {page for each in there.values() if (page := each.bootstrap_address)}
        for each in there.values():
            page = each.bootstrap_address
            if page is not None:
                alone = not conflicts.is_shared(page) and conflicts.cut_off(page) is None
                assert alone == (each.name in after)
    assert conflicts.remove("nobody") == set()


def test_who_joins_is_of_no_matter_to_those_elsewhere() -> None:
    """So a thousand engines join in time that grows as they do."""
    conflicts = BootstrapConflicts([OTHERS[1]])
    for number in range(100):
        spec = EngineSpec(f"e{number}", f"http://10.1.0.{number}:1", "prefill")
        assert conflicts.add(spec) == set()
    assert conflicts.add(EngineSpec("twin", "http://10.1.0.7:2", "prefill")) == {"e7", "twin"}
    assert conflicts.add(EngineSpec("third", "http://10.1.0.7:3", "prefill")) == set()
    assert conflicts.remove("e7") == set()
    assert conflicts.remove("third") == {"twin"}
