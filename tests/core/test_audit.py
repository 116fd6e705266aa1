"""The audit log: one JSON object a line, whatever a peer sent, without secrets, in a file of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from moonpool.core.config import config, logs
from moonpool.core.errors import ConfigError
from moonpool.core.service import audit
from tests.core.master_bed import ADMIN_TOKEN, MasterProcess

EVIL = 'a\r\n{"event":"engine_registered"}\x1b]0;pwned\x07\u202e\x7f\ud800'


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "audit.log"
    logs.begin("INFO")


def lines(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_an_event_is_one_line_whatever_a_peer_sent(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs.set_up(config.load(env={"MOONPOOL_LOG_AUDIT_FILE": str(file), "MOONPOOL_LOG_LEVEL": "error"}))
    audit.record("engine_registered", instance=EVIL, url=None, count=3)
    audit.record("engine_registered", instance="x" * 10_000)
    assert capsys.readouterr().err == ""
    text = file.read_text()
    assert text.isascii()
    assert text.replace("\n", "").isprintable()
    first, second = lines(file)
    assert (first["logger"], first["event"], first["instance"], first["count"]) == (
        "moonpool.audit",
        "engine_registered",
        EVIL,
        3,
    )
    assert {"url", "message"}.isdisjoint(first)
    assert len(str(second["instance"])) < 300


def test_without_a_file_it_stands_in_the_log_at_every_level(capsys: pytest.CaptureFixture[str]) -> None:
    logs.begin("ERROR")
    audit.record("promote", peer="10.0.0.7")
    place, _, event = capsys.readouterr().err.partition(" INFO moonpool.audit: ")
    assert place
    assert json.loads(event)["event"] == "promote"
    logs.begin("ERROR", as_json=True)
    audit.record("promote", peer="10.0.0.7")
    assert json.loads(capsys.readouterr().err)["peer"] == "10.0.0.7"


def test_a_file_that_was_renamed_is_made_anew(file: Path) -> None:
    logs.begin("INFO", audit_file=str(file))
    assert logs.audit_file() == str(file)
    audit.record("drain")
    old = file.rename(file.with_suffix(".1"))
    audit.record("take_over")
    assert [row["event"] for row in (*lines(old), *lines(file))] == ["drain", "take_over"]


def test_a_file_that_cannot_be_written_is_a_sentence_and_code_2(tmp_path: Path) -> None:
    place = tmp_path / "none" / "audit.log"
    done = subprocess.run(
        [sys.executable, "-m", "moonpool", "proxy", "--engine", "http://127.0.0.1:1"],
        env={"MOONPOOL_LOG_AUDIT_FILE": str(place), "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert f"log.audit_file = {place} cannot be written: No such file" in done.stderr.decode()
    assert done.stderr.count(b"\n") == 1
    with pytest.raises(ConfigError):
        logs.begin("INFO", audit_file=str(place))
    logs.begin("INFO")


def test_a_full_disk_ends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    logs.begin("INFO", audit_file="/dev/full")
    audit.record("drain")
    assert "log.audit_file" in capsys.readouterr().err
    logs.begin("INFO")


def test_refusals_without_end_are_few_lines(file: Path) -> None:
    logs.begin("INFO", audit_file=str(file))
    now_s = 100.0
    refusals = audit.Refusals(lambda: now_s)
    for _ in range(1000):
        refusals.record("key_refused", path="/engines")
    assert len(lines(file)) == audit.REFUSALS_AT_ONCE
    now_s += 1 / audit.REFUSALS_PER_S
    refusals.record("key_refused", path="/engines")
    assert lines(file)[-1]["left_out"] == 1000 - audit.REFUSALS_AT_ONCE


def test_a_key_stands_as_its_digest() -> None:
    assert audit.key_digest(b"secret") == "sha256:2bb80d53"
    assert audit.key_digest(b"") == ""


def test_a_master_records_who_promotes_it_and_who_may_not(file: Path) -> None:
    master = MasterProcess(env={"MOONPOOL_LOG_AUDIT_FILE": str(file)})
    try:
        wrong, right = (
            urllib.request.Request(
                f"{master.http}/promote", method="POST", headers={"Authorization": f"Bearer {token}"}
            )
            for token in ("wrong", ADMIN_TOKEN)
        )
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(wrong, timeout=30)
        urllib.request.urlopen(right, timeout=30).close()
        refused, promoted = lines(file)
    finally:
        master.close()
    assert (refused["event"], refused["path"], refused["peer"]) == ("key_refused", "/promote", "127.0.0.1")
    assert refused["key"] == audit.key_digest(b"wrong")
    assert (promoted["event"], promoted["peer"], promoted["taken_over"]) == ("promote", "127.0.0.1", False)
    assert ADMIN_TOKEN not in file.read_text()
