"""The registry: names, and classes of the user's own."""

from __future__ import annotations

import pytest

from moonpool.core.errors import ConfigError
from moonpool.disagg_proxy.conductor.choice import Choice, Request
from moonpool.disagg_proxy.conductor.policies.round_robin import RoundRobin
from moonpool.disagg_proxy.conductor.policy import POLICIES, hook_of, make_policy, turns_of
from moonpool.disagg_proxy.conductor.worker import Worker


class MyOwn:
    uses_tokens = False

    def choose(self, request: Request, instances: list[Worker], now_s: float) -> Choice:
        return Choice(instances[-1])


class Counts(MyOwn):
    def __init__(self) -> None:
        self.count = 0

    def sent(self, request: Request, choice: Choice, now_s: float) -> None:
        self.count += 1


class Unfit:
    pass


class SentIsNoMethod(MyOwn):
    sent = 1


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_each_name_makes_a_fresh_policy(name: str) -> None:
    assert make_policy(name) is not make_policy(name)


def test_a_class_of_the_users_own_is_made_by_its_path() -> None:
    instances = [Worker(place, f"e{place}") for place in range(3)]
    assert make_policy(f"{__name__}:MyOwn").choose(Request(), instances, 0.0).decode.place == 2


def test_it_may_hear_of_what_was_sent_or_not() -> None:
    policy, choice = Counts(), Choice(Worker(0, "e"))
    hook_of(policy)(Request(), choice, 0.0)
    hook_of(make_policy(f"{__name__}:MyOwn"))(Request(), choice, 0.0)
    assert policy.count == 1


class AnotherOrder(RoundRobin):
    pass


def test_the_data_plane_gives_the_turns_of_round_robin_itself_and_of_no_class_that_derives_from_it() -> None:
    policy = RoundRobin()
    assert turns_of(policy) is policy.turns
    for name in {*POLICIES, f"{__name__}:AnotherOrder"} - {"round_robin"}:
        assert turns_of(make_policy(name)) is None


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="round_robin"):
        make_policy("fastest")


@pytest.mark.parametrize(
    "path", ["no.such.module:Class", f"{__name__}:Absent", f"{__name__}:Unfit", f"{__name__}:SentIsNoMethod"]
)
def test_a_class_that_cannot_be_used_is_refused_in_one_sentence(path: str) -> None:
    with pytest.raises(ConfigError, match="policy"):
        make_policy(path)
