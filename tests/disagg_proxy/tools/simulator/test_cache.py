import random

import pytest

from moonpool.disagg_proxy.tools.simulator.cache import Caches
from moonpool.disagg_proxy.tools.simulator.eviction.recency import Lru
from moonpool.disagg_proxy.tools.simulator.expected import Expected


def test_a_chain_loses_its_end_first() -> None:
    cache = Lru(4)
    assert cache.keep([1, 2, 3]) == ([3, 2, 1], [])
    assert cache.keep([1, 9, 8]) == ([8, 9], [3])
    assert 2 in cache
    assert 3 not in cache


def test_what_does_not_fit_is_kept_from_the_front() -> None:
    cache = Lru(2)
    new, gone = cache.keep([1, 2, 3, 4])
    assert (new, gone, len(cache)) == ([2, 1], [], 2)
    assert Lru(0).keep([1, 2]) == ([], [])


def test_a_prompt_is_found_as_far_as_each_place_holds_it() -> None:
    caches = Caches(100, places=4)
    caches.keep(0, [1, 2, 3], 0.0)
    caches.keep(1, [1, 2], 0.0)
    caches.keep(2, [1, 7], 0.0)
    held = caches.find([1, 2, 3, 4])
    assert (list(held.by_place), held.anywhere, held.best) == ([3, 2, 1, 0], 3, 0)
    assert [caches.length(place, [1, 2, 3, 4]) for place in range(4)] == [3, 2, 1, 0]
    assert list(caches.find([]).by_place) == [0, 0, 0, 0]
    caches.clear(0)
    assert caches.find([1, 2, 3, 4]).anywhere == 2
    caches.check_integrity()


def test_what_is_on_its_way_counts_where_it_goes_until_it_is_there() -> None:
    caches, expected = Caches(100, places=2), Expected()
    caches.keep(0, [1], 0.0)
    expected.expect(1, [1, 2, 3])
    expected.expect(1, [1, 2])
    assert list(caches.find([1, 2, 3]).by_place) == [1, 0]
    coming = caches.find([1, 2, 3], expected=expected)
    assert (list(coming.by_place), coming.anywhere) == ([1, 3], 1)
    expected.arrived(1, [1, 2, 3])
    assert list(caches.find([1, 2, 3], expected=expected).by_place) == [1, 2]
    expected.arrived(1, [1, 2])
    assert list(caches.find([1, 2, 3], expected=expected).by_place) == [1, 0]
    expected.expect(0, [1, 2])
    expected.expect(1, [2, 3])
    expected.forget(0)
    expected.arrived(0, [1, 2])  # what is forgotten
    assert list(caches.find([1, 2, 3], expected=expected).by_place) == [1, 0]
    expected.arrived(1, [2, 3])
    assert not expected
    caches.check_integrity()
    expected.check_integrity()


@pytest.mark.parametrize("places", [3, 40])
def test_sets_of_bits_say_what_a_plain_look_says(places: int, rng: random.Random) -> None:
    chance = rng
    caches, expected = Caches(30, places=places), Expected()
    coming: list[tuple[int, list[int]]] = []
    for _ in range(400):
        chain = [chance.randrange(3) + 3 * depth for depth in range(chance.randrange(1, 12))]
        place = chance.randrange(places)
        act = chance.random()
        if act < 0.5:
            caches.keep(place, chain, 0.0)
        elif act < 0.7:
            expected.expect(place, chain)
            coming.append((place, chain))
        elif act < 0.9 and coming:
            expected.arrived(*coming.pop(chance.randrange(len(coming))))
        elif act > 0.98:
            caches.clear(place)
            expected.forget(place)
            coming = [each for each in coming if each[0] != place]
        held, later = caches.find(chain), caches.find(chain, expected=expected)
        for each in range(places):
            missing = [block not in caches.caches[each] for block in chain]
            own = missing.index(True) if True in missing else len(chain)
            assert own == held.by_place[each] == caches.length(each, chain)
            there = {block for at, blocks in coming if at == each for block in blocks}
            wanted = [block in caches.caches[each] or block in there for block in chain]
            assert later.by_place[each] == (wanted.index(False) if False in wanted else len(chain))
        for answer in (held, later):
            assert answer.best == answer.by_place.index(max(answer.by_place))
        somewhere = [any(block in cache for cache in caches.caches) for block in chain]
        assert held.anywhere == (somewhere.index(False) if False in somewhere else len(chain))
        caches.check_integrity()
        expected.check_integrity()
