"""Arenas larger than the memory that is available: refused before anything is reserved. Machines and control
groups are described by files, so nothing here takes more memory than it says."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from moonpool import Store, _native
from moonpool.core.config import config
from moonpool.core.config.arena_size import parse_arena_size
from moonpool.core.config.native_settings import node_settings
from moonpool.core.config.units import parse_size
from moonpool.core.errors import ConfigError, InvalidArgument
from moonpool.launch import up_plan

from .store_bed import MIB, TOKEN, until

GIB = 1 << 30
TOO_MUCH = "1000TiB"  # of any machine that runs this
Machine = Callable[..., str]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """machine(available=, limit=): the root of a /proc and /sys that says so; again: says another thing."""

    def describe(available: int = 64 * GIB, total: int = 128 * GIB, limit: int | None = None) -> str:
        files = {"proc/meminfo": f"MemTotal: {total >> 10} kB\nMemAvailable: {available >> 10} kB\n"}
        if limit is not None:
            files["proc/self/cgroup"] = "0::/pod\n"
            files["sys/fs/cgroup/pod/memory.max"] = f"{limit}\n"
            files["sys/fs/cgroup/pod/memory.current"] = f"{16 * MIB}\n"
            files["sys/fs/cgroup/pod/memory.stat"] = f"inactive_file {4 * MIB}\n"
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            draft = path.with_name("draft")
            draft.write_text(text)
            draft.replace(path)
        return str(tmp_path)

    return describe


def server(*tenants: tuple[str, int], root: str) -> _native.Server:
    return _native.Server("", list(tenants), TOKEN, node_settings(), memory_root=root)


def test_the_sentence_names_what_is_asked_what_there_is_and_what_fits(machine: Machine) -> None:
    root = machine(limit=400 * MIB)
    with pytest.raises(InvalidArgument) as caught:
        server(("default", GIB), root=root)
    match = re.fullmatch(
        r"the arena asks for 1\.0 GiB of memory, and the control group /pod has 388\.0 MiB available; "
        r"--dram (\d+MiB) would fit",
        str(caught.value),
    )
    assert match is not None, caught.value
    server(("default", parse_size(match[1])), root=root)


def test_the_arenas_of_all_tenants_count_together(machine: Machine) -> None:
    root = machine(available=3 * GIB, total=4 * GIB)
    server(("a", GIB), ("b", GIB), root=root)
    with pytest.raises(
        InvalidArgument, match=r"the arenas ask for 4\.0 GiB of memory in all, .* in all would"
    ):
        server(("a", GIB), ("b", GIB), ("c", 2 * GIB), root=root)


def test_a_machine_that_says_nothing_refuses_nothing(tmp_path: Path) -> None:
    server(("default", GIB), root=str(tmp_path))


def test_what_others_take_while_the_node_reserves_is_left_to_them(machine: Machine) -> None:
    """No piece is taken after the first one: it would come from processes that run already."""
    root = machine(available=3 * GIB, total=4 * GIB)
    node = server(("default", 512 * MIB), root=root)
    machine(available=80 * MIB, total=4 * GIB)
    node.start()
    try:
        notes: list[tuple[int, str, str, str, int]] = []

        def told() -> bool:  # a moment after it is so
            notes.extend(note for note in node.take_notes() if note[1] == "memory_short")
            return bool(notes)

        until(told, 30)
        assert node.memory() == (256 * MIB, 512 * MIB, True)
        assert node.metrics()["arena_memory_short"] == 1
        assert len(notes) == 1
        assert "others have taken the memory meanwhile" in notes[0][3]
    finally:
        node.stop()


def test_a_share_of_what_is_available(machine: Machine) -> None:
    root = machine(available=10 * GIB, total=16 * GIB)  # of which 512 MiB are kept free
    assert parse_arena_size("50%", root=root) == (9 * GIB + 512 * MIB) // 2
    assert parse_arena_size(" 12.5 % ", root=root) < parse_arena_size("13%", root=root)
    assert parse_arena_size("2GiB", root=root) == 2 * GIB
    for size in (parse_arena_size(text, root=root) for text in ("1%", "80%", "100%")):
        server(("default", size), root=root)
    for wrong in ("0%", "101%", "%", "80 percent"):
        with pytest.raises(ValueError, match=r"size|share"):
            parse_arena_size(wrong, root=root)


@pytest.mark.parametrize(
    ("file", "env", "arguments"),
    [
        ('[node]\ndram = "25%"\n', {}, {}),
        ("", {"MOONPOOL_NODE_DRAM": "25%"}, {}),
        ("", {}, {"node.dram": "25%"}),
    ],
)
def test_every_source_of_the_setting_takes_a_share(
    runtime: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    file: str,
    env: dict[str, str],
    arguments: dict[str, object],
) -> None:
    assert _native.room_for_arenas("") is not None
    # Of this machine others take and give meanwhile.
    monkeypatch.setattr(_native, "room_for_arenas", lambda _root: 40 * GIB)
    path = tmp_path / "moonpool.toml"
    path.write_text(file + '[[up.node]]\ndram = "10%"\n' if file else file)
    made = config.load(path, env=env, arguments=arguments)
    assert made.node.dram == 10 * GIB
    if file:
        assert made.up.node[0].dram == 4 * GIB  # type: ignore[index]


def test_a_number_with_a_point_is_no_size(tmp_path: Path) -> None:
    path = tmp_path / "moonpool.toml"
    path.write_text("[node]\ndram = 1.5\n")
    with pytest.raises(
        ConfigError, match=r'node.dram = 1.5 .* a size such as "1.5GiB", in quotes, or a whole'
    ):
        config.load(path, env={})


def test_the_command_exits_2_before_it_is_ready(runtime: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "moonpool", "node", "--dram", TOO_MUCH, "--http", "off"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "the arena asks for 1000.0 TiB of memory" in done.stderr
    assert "; --dram " in done.stderr
    assert sorted(path.name for path in runtime.iterdir()) == ["token"]


def test_an_address_space_that_is_too_small_is_refused_with_a_size_that_fits(runtime: Path) -> None:
    """A limit of 3 GiB, by `ulimit -v`."""

    def start(dram: str) -> subprocess.Popen[str]:
        command = ["sh", "-c", 'ulimit -v 3145728 && exec "$@"', "sh", sys.executable, "-m", "moonpool"]
        command += ["node", "--dram", dram, "--http", "off"]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    with start("3GiB") as refused:
        out, errors = refused.communicate(timeout=60)
    assert (refused.returncode, out) == (2, ""), errors
    match = re.fullmatch(
        r"moonpool: arenas of 3\.0 GiB in all do not fit into the address space, of which the limit "
        r"\(ulimit -v\) leaves 2\.\d GiB; raise the limit, or --dram (\d+MiB) would fit\n",
        errors,
    )
    assert match is not None, errors
    with start(match[1]) as fits:
        try:
            assert fits.stdout is not None
            assert fits.stdout.readline().startswith("moonpool node ")
        finally:
            fits.kill()


def test_an_embedded_node_and_up_refuse_it_too(runtime: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"the arena asks for 1000\.0 TiB .*; embedded=.* would fit"):
        Store(embedded=TOO_MUCH)
    several = config.load(
        env={},
        arguments={"up.node": [{"dram": "600TiB"}, {"dram": "600TiB"}], "up.proxy": False},
    )
    with pytest.raises(InvalidArgument, match=r"the arenas ask for 1200\.0 TiB of memory in all"):
        up_plan.plan(several, env={})
