import random

import pytest

from moonpool.disagg_proxy.tools.simulator.eviction.recency import Lru
from moonpool.disagg_proxy.tools.simulator.eviction.reuse_curves import SLOTS, ReuseCurves, gittins
from moonpool.disagg_proxy.tools.simulator.eviction.reuse_index import ReuseIndex


def by_trying(hazards: list[float], age: int) -> float:
    """Every horizon."""
    best = gain = cost = 0.0
    left = 1.0
    for hazard in hazards[age:]:
        gain += left * hazard
        cost += left * (1 - hazard / 2)
        left *= 1 - hazard
        best = max(best, gain / cost)
    return best


def test_the_index_is_the_best_ratio_over_all_horizons(rng: random.Random) -> None:
    for _ in range(50):
        hazards = [rng.random() ** 3 for _ in range(rng.randrange(1, 30))]
        wanted = [by_trying(hazards, age) for age in range(len(hazards))]
        assert gittins(hazards) == pytest.approx(wanted)


def test_a_chat_is_worth_the_more_the_nearer_its_next_turn() -> None:
    curves = ReuseCurves()
    for _ in range(2000):
        curves.went_on(1, 12)  # all after a minute
        curves.lost(0, SLOTS - 1)  # these never
    curves.learn([])
    talking, silent = curves.index[1], curves.index[0]
    assert talking[0] < talking[6] < talking[12]
    assert talking[12] > 20 * talking[13]
    assert max(silent[:200]) < talking[0] / 5


def test_those_that_still_wait_count_as_watched() -> None:
    impatient, patient = ReuseCurves(), ReuseCurves()
    for curves in (impatient, patient):
        for _ in range(100):
            curves.went_on(0, 3)
    impatient.learn([])
    patient.learn([(0, 10)] * 900)
    assert patient.index[0][0] < impatient.index[0][0] / 3


def chats(rng: random.Random) -> list[tuple[float, list[int]]]:
    """A tenth of all prompts begins a chat of ten turns, one a minute; the others never come back."""
    prompts = []
    block = 1
    for number in range(3000):
        at_s = 2.0 * number
        chain = [0] + [block + place for place in range(4)]
        block += 4
        prompts.append((at_s, chain))
        if rng.random() < 0.1:
            for turn in range(1, 10):
                chain = [*chain, block, block + 1]
                block += 2
                prompts.append((at_s + 60.0 * turn, chain))
    return sorted(prompts)


def test_chats_are_kept_and_single_prompts_are_not(rng: random.Random) -> None:
    prompts = chats(rng)
    found = {}
    for cache in (Lru(150), ReuseIndex(150)):
        hit = 0
        for at_s, prompt in prompts:
            hit += next((count for count, block in enumerate(prompt) if block not in cache), len(prompt))
            cache.keep(prompt, at_s)
        found[type(cache)] = hit
    assert found[ReuseIndex] > 1.5 * found[Lru]


def test_a_system_prompt_is_no_chat() -> None:
    cache = ReuseIndex(100)
    for number in range(500):
        cache.keep([0, number] if number % 2 else [0], float(number))
    seen = sum(map(sum, cache._curves._went_on))
    assert seen == 1  # by the first prompt behind it: who could know?
