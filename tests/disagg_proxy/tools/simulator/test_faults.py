"""Instances that join, leave, die and change their speed in mid simulation."""

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from moonpool.cli.entry import run as moonpool
from moonpool.core.errors import ConfigError
from moonpool.disagg_proxy.conductor.policy import POLICIES, make_policy
from moonpool.disagg_proxy.tools.simulator.cluster import Cluster, ClusterSettings
from moonpool.disagg_proxy.tools.simulator.faults import Act, ClusterEvent, check, parse, read_faults
from moonpool.disagg_proxy.tools.simulator.job import Job
from moonpool.disagg_proxy.tools.simulator.simulated_proxy import SimulatedProxy
from moonpool.disagg_proxy.tools.simulator.trace import BLOCK_TOKENS, Arrival
from tests.disagg_proxy.tools.simulator.clusters import PLAIN, at_random


def run(
    settings: ClusterSettings, arrivals: list[Arrival], *faults: str, policy: str = "conductor"
) -> list[Job]:
    """In the order of arrival."""
    jobs: list[Job] = []
    cluster = Cluster(
        settings, [SimulatedProxy(make_policy(policy))], jobs.append, [parse(each) for each in faults]
    )
    cluster.run(arrivals)
    cluster.check_integrity()
    assert len(jobs) == len(arrivals)
    return sorted(jobs, key=lambda job: job.name)


def test_a_prompt_whose_instance_dies_is_computed_by_another() -> None:
    settings = ClusterSettings(prefill=2, machine=PLAIN)
    one, two = run(
        settings,
        [Arrival(0.0, 1000, 1, (1, 2)), Arrival(0.0, 1000, 1, (3, 4))],
        "0.4 kill prefill-0",
    )
    first, second = (one, two) if one.attempt else (two, one)
    assert (first.attempt, second.attempt) == (1, 0)
    assert second.ttft_s == pytest.approx(1.0)
    assert first.ttft_s == pytest.approx(2.0)  # it is the other's turn first
    assert first.prefill_place == second.prefill_place


def test_an_answer_that_had_begun_is_lost_and_one_that_had_not_is_not() -> None:
    settings = ClusterSettings(prefill=1, decode=2, machine=PLAIN)
    blocks = tuple(range(6)), tuple(range(6, 12))
    arrivals = [Arrival(0.0, 3000, 501, each) for each in blocks]
    begun, waiting = run(settings, arrivals, "3.5 kill decode-0", "3.5 kill decode-1", "3.6 join decode-1")
    assert (begun.why_not, waiting.why_not) == ("lost", "")
    # Its own prompt was being computed, and was found again behind a millisecond for each token that is not.
    assert waiting.attempt == 1
    assert waiting.first_s == pytest.approx(6.0 + (3000 - 5 * BLOCK_TOKENS) / 1000)


def test_a_hand_over_from_an_instance_that_dies_begins_anew() -> None:
    slow = replace(PLAIN, link_bytes_s=1000.0)
    settings = ClusterSettings(prefill=2, decode=1, machine=slow, layerwise=False, pool=False)
    (cut,) = run(settings, [Arrival(0.0, 1000, 2, (1, 2))], "1.5 kill prefill-0", "1.5 join prefill-0")
    assert cut.attempt == 1
    # Half a second of the transfer was for nothing, but the receiving link is busy with it until 2.0.
    assert cut.first_s == pytest.approx(1.5 + 1.0 + 1.0)
    (whole,) = run(settings, [Arrival(0.0, 1000, 2, (1, 2))], "2.5 kill prefill-0")
    assert whole.attempt == 0


def test_the_dead_hold_nothing_and_come_back_with_nothing() -> None:
    blocks = tuple(range(4))
    arrivals = [Arrival(0.0, 2000, 1, blocks), Arrival(10.0, 2000, 1, blocks), Arrival(20.0, 2000, 1, blocks)]
    settings = ClusterSettings(prefill=1, machine=PLAIN)
    jobs = run(settings, arrivals, "5 kill prefill-0", "6 join prefill-0")
    assert [job.own for job in jobs] == [0, 0, 3 * BLOCK_TOKENS]


def test_who_leaves_ends_what_it_has() -> None:
    settings = ClusterSettings(prefill=1, decode=2, machine=PLAIN)
    arrivals = [Arrival(0.2 * number, 100, 300, (number,)) for number in range(20)]
    jobs = run(settings, arrivals, "2 leave decode-0")
    assert not any(job.attempt or job.why_not for job in jobs)
    places = {job.decode_place for job in jobs if job.arrival.at_s < 1.9}
    later = {job.decode_place for job in jobs if job.arrival.at_s > 2.1}
    assert places == {1, 2}
    assert later == {2}


@pytest.mark.parametrize("kill_s", [1.5, 3.0], ids=["sent anew", "lost"])
def test_who_leaves_is_gone_when_what_it_had_went_on_elsewhere(kill_s: float) -> None:
    slow = replace(PLAIN, link_bytes_s=1000.0)  # a hand-over takes a second
    settings = ClusterSettings(prefill=2, decode=2, machine=slow, layerwise=False)
    arrivals = [Arrival(0.0, 1000, 501, (1, 2)), Arrival(20.0, 1000, 2, (1, 2))]
    first, later = run(settings, arrivals, "0.5 leave prefill-0", f"{kill_s} kill decode-0")
    assert (first.attempt, first.why_not) == ((1, "") if kill_s == 1.5 else (0, "lost"))
    assert later.prefill_place == 1
    assert later.fetched == 0
    assert later.own == (BLOCK_TOKENS if first.attempt else 0)  # of its second attempt


def test_who_joins_gets_its_share() -> None:
    settings = ClusterSettings(prefill=1, machine=PLAIN)
    arrivals = [Arrival(1.1 * number, 1000, 1, (2 * number, 2 * number + 1)) for number in range(60)]
    slow = run(settings, [replace_tokens(each) for each in arrivals])
    helped = run(settings, [replace_tokens(each) for each in arrivals], "10 join prefill")
    assert {job.prefill_place for job in helped} == {0, 1}
    assert helped[-1].ttft_s < slow[-1].ttft_s / 5


def replace_tokens(arrival: Arrival) -> Arrival:
    return arrival._replace(tokens=1500, blocks=(*arrival.blocks, arrival.blocks[0] + 10_000))


def test_without_anybody_requests_are_refused_until_somebody_joins() -> None:
    settings = ClusterSettings(prefill=1, decode=1, machine=PLAIN)
    arrivals = [Arrival(float(number), 100, 2, (number,)) for number in range(10)]
    jobs = run(settings, arrivals, "2.5 kill decode-0", "6.5 join decode-0")
    assert [job.why_not for job in jobs] == [""] * 3 + ["no_instance"] * 4 + [""] * 3


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_request_is_over_however_instances_come_and_go(policy: str, rng: random.Random) -> None:
    settings = ClusterSettings(prefill=3, decode=2, whole=2, machine=PLAIN, chunk_tokens=700)
    counts = {"prefill": 3, "decode": 2, "whole": 2}
    there = [f"{kind}-{number}" for kind, count in counts.items() for number in range(count)]
    gone: list[str] = []
    faults = []
    at_s = 0.0
    for _ in range(40):
        at_s += rng.expovariate(0.3)
        if len(gone) == 3 or (gone and rng.random() < 0.5):
            name = gone.pop(rng.randrange(len(gone)))
            there.append(name)
            faults.append(f"{at_s:.3f} join {name}")
        else:
            name = there.pop(rng.randrange(len(there)))
            gone.append(name)
            faults.append(f"{at_s:.3f} {rng.choice(('kill', 'leave'))} {name}")
    jobs = run(settings, at_random(rng, 200, 1.5), *faults, policy=policy)
    served = [job for job in jobs if not job.why_not]
    assert {job.why_not for job in jobs} <= {"", "lost", "no_instance"}
    assert len(served) > 40
    for job in served:
        assert job.arrival.at_s <= job.begun_s <= job.computed_s <= job.first_s <= job.done_s < math.inf


def test_an_instance_that_slows_down_takes_longer_for_what_it_begins() -> None:
    settings = ClusterSettings(whole=1, machine=PLAIN)
    arrivals = [Arrival(at_s, 1000, 11, (int(at_s), 100 + int(at_s))) for at_s in (0.0, 10.0, 20.0)]
    usual, slow, again = run(settings, arrivals, "5 slow whole-0 4", "15 slow whole-0 1")
    assert usual.ttft_s == again.ttft_s == pytest.approx(1.0)
    assert slow.ttft_s == pytest.approx(4.0)
    assert slow.done_s - slow.first_s == pytest.approx(4 * (usual.done_s - usual.first_s))


def test_an_answer_goes_on_slower_from_the_moment_on_at_which_its_instance_slows_down() -> None:
    settings = ClusterSettings(whole=1, machine=PLAIN)
    (job,) = run(settings, [Arrival(0.0, 1000, 101, (1, 2))], "1.5 slow whole-0 2")
    assert job.done_s == pytest.approx(1.0 + 0.5 + 2 * 0.5)


def test_times_have_units() -> None:
    assert parse("600s kill prefill-3") == ClusterEvent(600.0, Act.KILL, "prefill-3")
    assert parse(" 1.5m join decode ") == ClusterEvent(90.0, Act.JOIN, "decode")
    assert parse("2h leave whole-0").at_s == 7200.0
    assert parse("5 slow whole-1 2.5") == ClusterEvent(5.0, Act.SLOW, "whole-1", 2.5)
    assert parse(str(parse("5 slow whole-1 2.5"))) == parse("5 slow whole-1 2.5")
    assert parse(str(parse("7 join prefill-0"))) == parse("7 join prefill-0")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "kill prefill-3",
        "10 kill prefill",
        "10 leave decode",
        "-5 kill prefill-0",
        "10 hug prefill-0",
        "10 slow prefill-0",
        "10 slow prefill-0 0",
        "10 kill prefill-0 4",
    ],
)
def test_what_is_no_event_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is no event; it looks like"):
        parse(text)


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["5 kill prefill-9"], "there is no prefill-9"),
        (["5 kill prefill-0", "6 kill prefill-0"], "6 kill prefill-0: there is no prefill-0"),
        (["6 join prefill-0"], "prefill-0 is there already"),
        (["6 join prefill-5"], "there never was a prefill-5; 'join prefill' makes prefill-2"),
        (["6 join whole"], "this cluster has no whole instances"),
        (["8 leave decode-1", "7 kill decode-1"], "8 leave decode-1: there is no decode-1"),
    ],
)
def test_what_cannot_happen_is_refused(texts: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(map(parse, texts), {"prefill": 2, "decode": 2, "whole": 0})
    assert said in str(caught.value)


def test_a_file_of_events_names_its_broken_line(tmp_path: Path) -> None:
    path = tmp_path / "events"
    path.write_text("# a bad day\n\n600s kill prefill-0\n")
    assert [each.at_s for each in read_faults(path)] == [600.0]
    path.write_text("600s kill prefill-0\nnonsense\n")
    with pytest.raises(ConfigError, match="line 2"):
        read_faults(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_faults(tmp_path / "none")


def test_events_are_given_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, events = tmp_path / "trace.jsonl", tmp_path / "events"
    rows = [
        {
            "timestamp": 1000 * number,
            "input_length": 600,
            "output_length": 9,
            "hash_ids": [number, 500 + number],
        }
        for number in range(20)
    ]
    trace.write_text("\n".join(map(json.dumps, rows)))
    events.write_text("12 join decode-0\n")
    arguments = ["simulate", str(trace), "--policy", "conductor", "--prefill", "1", "--decode", "1"]
    arguments += ["--event", "5.5s kill decode-0", "--events", str(events), "--json", "-"]
    assert moonpool(arguments) == 0
    (found,) = json.loads(capsys.readouterr().out)["runs"]
    assert found["reasons"] == {"no_instance": 7}
    assert moonpool([*arguments, "--event", "3 kill decode-7"]) == 2
    assert "there is no decode-7" in capsys.readouterr().err


def test_a_clock_that_goes_back_is_noticed_and_one_that_leaps_is_followed() -> None:
    settings = ClusterSettings(prefill=1, machine=PLAIN)
    with pytest.raises(ConfigError, match="before the one ahead of it"):
        run(settings, [Arrival(5.0, 100, 1, (1,)), Arrival(4.0, 100, 1, (2,))])
    leap = run(settings, [Arrival(0.0, 100, 1, (1,)), Arrival(1e9, 100, 1, (2,))])
    assert leap[1].ttft_s == pytest.approx(0.1)


@pytest.mark.parametrize("who", ["prefill", "prefill-1"])
def test_one_that_joins_knows_what_its_sisters_have_learnt(who: str, rng: random.Random) -> None:
    """A machine ten times slower than the prior: the newcomer's very first request is predicted about right
    (of a hundred requests, what takes no tenth of a second is learnt least well)."""
    settings = ClusterSettings(prefill=3, machine=PLAIN)
    arrivals = at_random(rng, 150, 1.0)
    join_s = arrivals[100].at_s + 1e-3
    jobs = run(settings, arrivals, "1 kill prefill-1", f"{join_s} join {who}")
    place = 1 if who == "prefill-1" else 3
    first = next(job for job in jobs if job.prefill_place == place and job.arrival.at_s > join_s)
    assert first.predicted_ttft_s == pytest.approx(first.ttft_s, rel=0.6, abs=0.1)
