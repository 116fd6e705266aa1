from __future__ import annotations

import random
from collections import Counter

from moonpool.connectors.lmcache.locks import HELD_S, UNASKED_S, Locks


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Pin:
    def __init__(self) -> None:
        self.released = 0

    def release(self) -> None:
        self.released += 1


def test_a_pin_ends_with_its_last_key() -> None:
    locks, pin = Locks(), Pin()
    locks.add(pin, ["a", "b", "c"])
    locks.release(["b", "a"])
    assert (pin.released, len(locks)) == (0, 1)
    assert locks.pin_of("c") is pin
    assert locks.pin_of("a") is None
    locks.release(["c", "a", "never locked"])
    assert (pin.released, len(locks)) == (1, 0)


def test_a_key_locked_twice_is_unlocked_twice() -> None:
    locks, first, second = Locks(), Pin(), Pin()
    locks.add(first, ["a"])
    locks.add(second, ["a", "a"])
    locks.release(["a"])
    assert (first.released, second.released) == (1, 0)
    locks.release(["a"])
    assert (second.released, locks.pin_of("a")) == (0, second)
    locks.release(["a"])
    assert second.released == 1


def test_clear_ends_each_pin_once() -> None:
    locks, first, second = Locks(), Pin(), Pin()
    locks.add(first, ["a", "b"])
    locks.add(second, ["b"])
    locks.clear()
    locks.release(["a", "b"])
    assert (first.released, second.released, len(locks)) == (1, 1, 0)


def test_what_nobody_asked_for_ends() -> None:
    clock, pin, other = Clock(), Pin(), Pin()
    locks = Locks(clock)
    locks.add(pin, ["a", "b", "a"])
    clock.now_s += UNASKED_S - 1
    locks.add(other, ["a"])
    assert (locks.expire(), pin.released) == (0, 0)
    clock.now_s += 2
    assert (locks.expire(), locks.expire(), locks.expired) == (1, 0, 1)
    assert (pin.released, other.released, len(locks)) == (1, 0, 1)
    assert (locks.pin_of("a"), locks.pin_of("b")) == (other, None)
    locks.release(["b"])
    locks.release(["a"])
    assert (pin.released, other.released, len(locks)) == (1, 1, 0)


def test_what_nobody_unlocks_ends() -> None:
    clock, pin = Clock(), Pin()
    locks = Locks(clock)
    lock = locks.add(pin, ["a", "b"])
    locks.hold(lock)
    locks.release(["b"])
    clock.now_s += HELD_S - 1
    assert (locks.expire(), locks.pin_of("a")) == (0, pin)
    clock.now_s += 2
    assert (locks.expire(), pin.released, len(locks)) == (1, 1, 0)


def test_what_was_unlocked_does_not_expire() -> None:
    clock, pin = Clock(), Pin()
    locks = Locks(clock)
    locks.add(pin, ["a"])
    locks.release(["a"])
    clock.now_s += HELD_S + UNASKED_S
    assert (locks.expire(), pin.released) == (0, 1)
    locks.clear()
    assert pin.released == 1


def test_against_plain_counting() -> None:
    seed = 5
    print(f"seed {seed}")
    source = random.Random(seed)
    locks, held, pins = Locks(), Counter[str](), []
    for _ in range(3000):
        keys = source.choices("abcdef", k=source.randint(1, 4))
        if source.random() < 0.45:
            pins.append(Pin())
            locks.add(pins[-1], keys)
            held.update(keys)
        else:
            locks.release(keys)
            held = Counter({key: max(n - keys.count(key), 0) for key, n in held.items()})
        assert len(locks) == sum(1 for n in held.values() if n)
        assert all(pin.released <= 1 for pin in pins)
        assert all((locks.pin_of(key) is None) == (held[key] == 0) for key in "abcdef")
    locks.clear()
    assert all(pin.released == 1 for pin in pins)
