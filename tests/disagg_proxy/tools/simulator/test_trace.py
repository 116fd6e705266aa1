from pathlib import Path

import pytest

from moonpool.core.errors import ConfigError
from moonpool.disagg_proxy.tools.simulator.trace import BLOCK_TOKENS, Arrival, Trace, read_trace


def row(timestamp: object = 0, tokens: int = 600, answer: int = 5, ids: object = (1, 2)) -> str:
    text = list(ids) if isinstance(ids, tuple) else ids
    times = f'"timestamp": {timestamp}'
    return f'{{{times}, "input_length": {tokens}, "output_length": {answer}, "hash_ids": {text}}}'


def written(folder: Path, *lines: str) -> Path:
    path = folder / "small.jsonl"
    path.write_text("\n".join(lines))
    return path


def test_times_are_seconds_from_the_first_request(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, row(2000), "", row(2500, 513), row(9000, 1, 0, (7,))))
    rows = list(trace.rows)
    assert [arrival.at_s for arrival in rows] == [0.0, 0.5, 7.0]
    assert rows[1] == Arrival(0.5, 513, 5, [1, 2])
    assert (trace.name, trace.seconds, trace.quantum_s) == ("small", 7.0, 0.0)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2, is no request"),
        ('{"timestamp": 1, "input_length": 5}', "line 2, is no request"),
        (row(tokens=0), "line 2, is no request"),
        (row(tokens=-3), "line 2, is no request"),
        (row(timestamp='"now"'), "line 2, is no request"),
        (row(timestamp="1e999"), "line 2, is no request"),
        (row(ids='["x"]'), "line 2, is no request"),
        (row(2000, 513, 5, (1,)), "line 2, has 1 hash_ids; 513 tokens are 2 blocks of 512"),
        (row(999), "line 2, has timestamp 999, before the line above; sort it by time"),
        ("\xff", "line 2, is no request"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_bytes((row(1000) + "\n").encode() + line.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"broken\.jsonl") as caught:
        read_trace(path)
    assert said in str(caught.value)


def test_a_trace_of_nothing_and_one_that_is_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no request"):
        read_trace(written(tmp_path, "", ""))
    with pytest.raises(ConfigError, match=r"gone\.jsonl cannot be read"):
        read_trace(tmp_path / "gone.jsonl")


def test_a_file_that_lost_requests_since_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, row(0), row(1), row(2))
    trace = read_trace(path)
    written(tmp_path, row(0))
    with pytest.raises(ConfigError, match="had 3 requests when it was read first, and has 1 now"):
        list(trace.arrivals())


def rounded() -> Trace:
    """Every 3 s four requests at one time."""
    rows = [Arrival(3.0 * (number // 4), 600, 5, (number, number + 100)) for number in range(40)]
    return Trace("rounded", rows)


def test_rounded_times_are_spread_within_what_they_were_rounded_to() -> None:
    trace = rounded()
    assert trace.quantum_s == 3.0
    arrivals = list(trace.arrivals(seed=1))
    times = [arrival.at_s for arrival in arrivals]
    assert times == sorted(times)
    assert len(set(times)) == 40
    for group in range(10):
        assert all(3.0 * group <= at_s < 3.0 * group + 3.0 for at_s in times[4 * group : 4 * group + 4])
    assert sorted(arrival.blocks[0] for arrival in arrivals) == list(range(40))
    assert arrivals == list(trace.arrivals(seed=1))
    assert times != [arrival.at_s for arrival in trace.arrivals(seed=2)]


def test_spread_times_stay_in_order_where_the_steps_are_uneven() -> None:
    starts = [0.0, 3.0, 5.9, 8.9, 12.0, 14.9, 15.0, 18.0]
    trace = Trace("uneven", [Arrival(at_s, 600, 5, (1, 2)) for at_s in starts for _ in range(4)])
    assert trace.quantum_s == 3.0
    times = [arrival.at_s for arrival in trace.arrivals(copies=50)]
    assert times == sorted(times)
    assert max(at_s for at_s in times if at_s < 15.0) > 14.99


def test_more_speed_is_less_time_between_requests() -> None:
    slow, fast = list(rounded().arrivals(seed=1)), list(rounded().arrivals(seed=1, speed=4.0))
    assert [arrival.at_s for arrival in fast] == pytest.approx([arrival.at_s / 4 for arrival in slow])


def test_copies_come_at_the_same_time_and_share_no_block() -> None:
    arrivals = list(rounded().arrivals(seed=1, copies=3))
    assert len(arrivals) == 120
    times = [arrival.at_s for arrival in arrivals]
    assert times == sorted(times)
    blocks = [block for arrival in arrivals for block in arrival.blocks]
    assert len(set(blocks)) == 3 * len({block for row in rounded().rows for block in row.blocks})


def test_the_block_with_the_last_token_is_not_kept() -> None:
    """It has to be computed in any case, for the first token of the answer."""
    ids = (1, 2)
    assert Arrival(0, 2 * BLOCK_TOKENS, 1, ids).full_blocks == (1,)
    assert Arrival(0, 2 * BLOCK_TOKENS - 1, 1, ids).full_blocks == (1,)
    assert Arrival(0, BLOCK_TOKENS + 1, 1, ids).full_blocks == (1,)
    assert Arrival(0, BLOCK_TOKENS, 1, (1,)).full_blocks == ()
