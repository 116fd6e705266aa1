"""`moonpool simulate`, as it is typed."""

import json
import os
import random
import threading
from dataclasses import fields, replace
from pathlib import Path

import pytest

from moonpool.cli.entry import run
from moonpool.disagg_proxy.tools.simulator.cluster import ClusterSettings
from moonpool.disagg_proxy.tools.simulator.job import Job
from moonpool.disagg_proxy.tools.simulator.loads import Loads
from moonpool.disagg_proxy.tools.simulator.machine import MACHINES, Machine, _Own, find_machine
from moonpool.disagg_proxy.tools.simulator.report import best_splits, recommendation
from moonpool.disagg_proxy.tools.simulator.results import Results, Slo
from moonpool.disagg_proxy.tools.simulator.runs import Plan, Run
from moonpool.disagg_proxy.tools.simulator.trace import BLOCK_TOKENS, Arrival


@pytest.fixture
def trace(tmp_path: Path, rng: random.Random) -> Path:
    """Two hundred requests of a few users, whose prompts grow."""
    rows = []
    prompts: dict[int, list[int]] = {}
    for number in range(200):
        user = rng.randrange(12)
        prompt = prompts.setdefault(user, [0])
        prompt = prompts[user] = [
            *prompt,
            *(1000 + 10 * number + place for place in range(rng.randrange(1, 4))),
        ]
        rows.append(
            {
                "timestamp": 500 * number,
                "input_length": len(prompt) * BLOCK_TOKENS - 10,
                "output_length": rng.randrange(1, 50),
                "hash_ids": prompt,
            }
        )
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_policies_are_compared_in_one_command(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, picture, figures = tmp_path / "runs.html", tmp_path / "runs.png", tmp_path / "runs.json"
    arguments = ["simulate", str(trace), "--policy", "conductor,round_robin/local", "--prefill", "2"]
    arguments += ["--decode", "1", "--plot", str(page), "--plot", str(picture), "--json", str(figures)]
    assert run(arguments) == 0
    said = capsys.readouterr().out
    assert "conductor" in said
    assert "round_robin/local" in said
    runs = json.loads(figures.read_text())["runs"]
    assert [(each["policy"], each["pool"], each["requests"]) for each in runs] == [
        ("conductor", True, 200),
        ("round_robin", False, 200),
    ]
    assert runs[0]["own"] + runs[0]["fetched"] > runs[1]["own"] > 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "<td>round_robin/local</td>" in page.read_text()
    assert "data:image/png;base64," in page.read_text()


@pytest.mark.parametrize(
    ("arguments", "requests"),
    [
        (["--policy", "conductor,round_robin"], [200, 200]),
        (["--policy", "conductor,round_robin", "--processes", "2"], [200, 200]),
        (["--policy", "conductor,round_robin", "--capacity"], None),
    ],
)
def test_a_pipe_is_read_once(
    trace: Path,
    tmp_path: Path,
    arguments: list[str],
    requests: list[int] | None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(trace.read_bytes()), daemon=True)
    writer.start()
    found = []
    for path in (pipe, trace):
        assert run(["simulate", str(path), "--prefill", "1", "--decode", "1", *arguments, "--json", "-"]) == 0
        found.append(json.loads(capsys.readouterr().out)["runs"])
        for each in found[-1]:
            each.pop("cpu_s", None)
    writer.join()
    assert found[0] == found[1]
    assert requests is None or [each["requests"] for each in found[0]] == requests


def test_json_on_standard_output_stands_alone(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", "run", str(trace), "--policy", "conductor", "--json", "-"]) == 0
    caught = capsys.readouterr()
    assert json.loads(caught.out)["runs"][0]["requests"] == 200
    assert "conductor" in caught.err


def test_capacity_and_the_best_split_are_found(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ["simulate", str(trace), "--policy", "conductor", "--ttft-slo", "2"]
    assert run([*base, "--capacity", "--prefill", "1", "--decode", "1", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)["runs"][0]
    assert found["speed"] > 0
    assert not found["at_least"]
    assert run([*base, "--sweep-pd", "4", "--speed", "1,8", "--gap-slo", "0.03"]) == 0
    said = capsys.readouterr().out
    assert all(split in said for split in ("1P+3D", "2P+2D", "3P+1D"))
    assert [line.partition(":")[0] for line in said.splitlines() if line.startswith("Best")] == [
        "Best at 1x under conductor",
        "Best at 8x under conductor",
    ]


def test_slow_links_make_fetching_slow(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for link in ("0", "87", "0.5"):
        arguments = ["--policy", "round_robin", "--prefill", "3", "--decode", "1", "--link", link]
        assert run(["simulate", str(trace), *arguments, "--json", "-"]) == 0
        found.append(json.loads(capsys.readouterr().out)["runs"][0]["ttft_mean_s"])
    assert found[0] == found[1]
    assert found[2] > 1.5 * found[1]


def test_a_machine_of_ones_own(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = tmp_path / "ours.json"
    own.write_text('{"like": "h100_fp8", "prefill_s": 9.0}')
    assert find_machine(str(own)) == replace(MACHINES["h100_fp8"], prefill_s=9.0)
    arguments = ["simulate", str(trace), "--policy", "round_robin", "--requests", "1", "--machine", str(own)]
    assert run([*arguments, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["ttft_mean_s"] > 9
    for text, said in (
        ('{"like": "abacus"}', "not abacus"),
        ('{"prefil_s": 1}', "prefil_s"),
        ('{"kv_bytes": 0.5}', "kv_bytes"),
        ('{"link_bytes_s": 0}', "a machine's link_bytes_s must be positive"),
        ("[", "cannot be read"),
    ):
        own.write_text(text)
        assert run(arguments) == 2
        assert said in capsys.readouterr().err


def test_the_fields_of_a_file_are_those_of_a_machine() -> None:
    assert set(_Own.__struct_fields__) == {"like", *(field.name for field in fields(Machine))}


def test_no_objective_is_any_time(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--policy", "round_robin", "--ttft-slo", "0", "--admission", "ahead", "--speed", "50"]
    assert run(["simulate", str(trace), *arguments, "--plot", str(tmp_path / "any.png")]) == 0
    said = capsys.readouterr().out
    assert "within any time" in said
    assert "100.0 │" in said


def test_a_capacity_without_end_is_said_to_be_at_least(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = tmp_path / "capacity.json"
    arguments = ["--requests", "20", "--policy", "round_robin", "--ttft-slo", "1e9", "--capacity"]
    assert run(["simulate", str(trace), *arguments, "--json", str(figures)]) == 0
    assert "at least 1024.00 times" in capsys.readouterr().out
    assert json.loads(figures.read_text())["runs"][0]["at_least"]


def run_of(trace: Path, prefill: int, jobs: list[tuple[float, float]], speed: float = 1.0) -> Run:
    """jobs: (seconds to the first token, of the gap) each; four instances."""
    results = Results()
    for ttft_s, gap_s in jobs:
        job = Job(1, Arrival(0.0, 100, 5, (1,)))
        job.first_s, job.gap_s = ttft_s, gap_s
        results.add(job)
    plan = Plan(trace, ClusterSettings(prefill=prefill, decode=4 - prefill), speed=speed)
    return Run(plan, results, Loads(), 1.0, 1.0, 1.0, 0)


def test_the_best_split_is_that_of_its_speed_and_has_room_on_both_sides(trace: Path) -> None:
    """Where as many are good, neither first tokens nor gaps come near their objective."""
    slo = Slo(1.0, 0.1)
    runs = [
        run_of(trace, 1, [(0.9, 0.02)] * 4),
        run_of(trace, 2, [(0.5, 0.05)] * 4),
        run_of(trace, 3, [(0.1, 0.09)] * 4),
        run_of(trace, 2, [(2.0, 0.05)] * 4, speed=2.0),
        run_of(trace, 3, [(0.9, 0.09)] * 4, speed=2.0),
    ]
    assert [recommendation(best, slo) for best in best_splits(runs, slo)] == [
        "Best at 1x under conductor: 2P+2D, 100.0% good",
        "Best at 2x under conductor: 3P+1D, 100.0% good",
    ]
    assert best_splits([run_of(trace, 1, [])], slo)


def test_hit_rate_is_drawn_over_capacity(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, picture, figures = tmp_path / "hits.html", tmp_path / "hits.png", tmp_path / "hits.json"
    arguments = ["simulate", "cache", str(trace), "--blocks", "200,0,20", "--plot", str(page)]
    assert run([*arguments, "--plot", str(picture), "--json", str(figures)]) == 0
    found = json.loads(figures.read_text())
    assert (found["blocks"], found["requests"], found["block_tokens"]) == ([0, 20, 200], 200, 512)
    rates = found["hit_rate"]
    assert {"lru", "fifo", "lfu", "sieve", "s3fifo", "batches", "reuse_index", "clairvoyant"} == set(rates)
    for none, few, many in rates.values():
        assert none == 0.0 <= few < many
    assert all(rate[1] <= rates["clairvoyant"][1] for rate in rates.values())
    assert "<th>200</th>" in page.read_text()
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "reuse_index" in capsys.readouterr().out


def test_each_instances_cache_can_be_of_another_kind(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--cache-tokens", str(25 * BLOCK_TOKENS), "--prefill", "1", "--decode", "0", "--json", "-"]
    found = {}
    for eviction in ("lru", "fifo"):
        assert run(["simulate", str(trace), "--policy", "conductor", "--eviction", eviction, *small]) == 0
        found[eviction] = json.loads(capsys.readouterr().out)["runs"][0]["own"]
    assert found["lru"] > found["fifo"]


@pytest.mark.parametrize("speed", ["1e-6", "1e6"])
def test_the_slowest_and_the_fastest_speed(
    trace: Path, speed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["simulate", str(trace), "--policy", "conductor", "--speed", speed, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["requests"] == 200


def test_instances_without_a_cache_reuse_nothing(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of what was computed; requests that are under way together are expected to share, in vain."""
    none = ["--cache-tokens", "0", "--policy", "conductor,round_robin", "--json", "-"]
    assert run(["simulate", str(trace), *none]) == 0
    for each in json.loads(capsys.readouterr().out)["runs"]:
        assert (each["requests"], each["own"], each["fetched"]) == (200, 0, 0)
    assert run(["simulate", "cache", str(trace), "--blocks", "0", "--json", "-"]) == 0
    assert set(map(tuple, json.loads(capsys.readouterr().out)["hit_rate"].values())) == {(0.0,)}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "missing argument"),
        (["--policy", "nobody"], "there is no policy 'nobody'"),
        (["--eviction", "mru"], "there is no cache 'mru'"),
        (["--admission", "maybe"], "--admission is one of none"),
        (["--machine", "abacus"], "--machine knows paper"),
        (["--machine", "not-there.json"], "the machine not-there.json cannot be read"),
        (["--speed", "0"], "the speed must be positive"),
        (["--speed", "1e-308"], "the speed must be positive, 1e-06 to 1e+06, not 1e-308"),
        (["--speed", "1e300"], "the speed must be positive"),
        (["--speed", "inf"], "the speed must be positive"),
        (["--speed", "nan"], "the speed must be positive"),
        (["--speed", "fast"], "--speed takes numbers"),
        (["--prefill", "0", "--decode", "2"], "instances that compute prompts"),
        (["--width", "2", "--chunk-tokens", "0"], "a pipeline has a width"),
        (["--sweep-pd", "1"], "--sweep-pd needs two instances"),
        (["--sweep-pd", "4"], "--sweep-pd needs --gap-slo"),
        (["--sweep-pd", "4", "--gap-slo", "1", "--whole", "2"], "--whole has no place"),
        (["--capacity", "--sweep-pd", "4"], "with --capacity --sweep-pd is another question"),
        (["--capacity", "--plot", "x.png"], "with --capacity there is nothing to --plot"),
        (["--capacity", "--processes", "2"], "with --capacity --processes cannot help"),
        (["--capacity", "--speed", "1,2"], "with --capacity --speed is one number"),
        (["--json", "not-there/load.json"], "there is no folder"),
        (["--json", "."], "it is a folder"),
        (["--prefill", "10001"], "less than or equal to 10000"),
        (["--plot", "load.pdf"], "a plot is a .png or an .html file"),
        (["--plot", "not-there/load.png"], "the folder of not-there/load.png does not exist"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(
    trace: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(trace)] if arguments else []
    assert run(["simulate", *given, *arguments]) == 2
    wrong = capsys.readouterr().err
    assert said in wrong
    assert wrong.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--policy", "mru"], "--policy takes all or names of lru"),
        (["--blocks", "many"], "--blocks takes whole numbers"),
        (["--blocks=-5"], "--blocks cannot be negative"),
    ],
)
def test_caches_that_cannot_be_are_refused(
    trace: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["simulate", "cache", str(trace), *arguments]) == 2
    assert said in capsys.readouterr().err
