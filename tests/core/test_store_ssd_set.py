"""Nodes with several SSD directories, of which one is away at a start."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from moonpool import STORED, Store, _native
from moonpool.core.config.native_settings import node_settings
from moonpool.core.errors import Error
from moonpool.core.store.types import PutStatus

from .ssd_bed import BLOCK, Bed, bed, content, end, put
from .store_bed import MIB, TOKEN, NodeProcess, until

__all__ = ["bed"]

# Writes of a block or more wait while the file of SLOW_FLAG exists.
SLOW_DISK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
static ssize_t held(const char* name, int fd, const void* from, size_t n, off_t at) {
    const char* flag = getenv("SLOW_FLAG");
    struct timespec pause = {0, 2000000};
    while (flag != NULL && n >= 4096 && access(flag, F_OK) == 0) nanosleep(&pause, NULL);
    ssize_t (*real)(int, const void*, size_t, off_t) = dlsym(RTLD_NEXT, name);
    return real(fd, from, n, at);
}
ssize_t pwrite(int fd, const void* from, size_t n, off_t at) { return held("pwrite", fd, from, n, at); }
ssize_t pwrite64(int fd, const void* from, size_t n, off_t at) { return held("pwrite64", fd, from, n, at); }
"""


def node_on(bed: Bed, *places: Path) -> NodeProcess:
    node = NodeProcess(
        bed.socket,
        tenants=[["default", 32 * MIB]],
        ssd=[[str(place), 32 * MIB] for place in places],
        ssd_segment_bytes=MIB,
    )
    bed.nodes.append(node)
    return node


def values(store: Store, names: list[str]) -> list[bytes | None]:
    views = store.get(names)
    return [None if view is None else bytes(view) for view in views]


@pytest.mark.parametrize("killed", [False, True])
def test_a_directory_that_was_away_brings_back_nothing_removed_or_replaced(
    bed: Bed, tmp_path: Path, killed: bool
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    names = [f"k{i}" for i in range(80)]
    first = node_on(bed, one, two)
    with bed.store() as store:
        put(store, range(80), 8192)
    end(first)
    alone = node_on(bed, one)
    with bed.store() as store:
        missing = [name for name, value in zip(names, values(store, names), strict=True) if value is None]
        assert 20 < len(missing) < 60
        replaced, removed, put_anew, kept = (missing[i::4] for i in range(4))
        assert [r.status for r in store.put(replaced, [b"new"] * len(replaced), replace=True)] == [
            PutStatus.STORED
        ] * len(replaced)
        assert [r.status for r in store.put(put_anew, [b"new"] * len(put_anew))] == [PutStatus.STORED] * len(
            put_anew
        )
        store.remove(removed)
    assert alone.metric("ssd_directories_away") == 1
    if killed:
        end(alone)
        alone = node_on(bed, one)
        alone.kill()
        bed.socket.unlink(missing_ok=True)
    else:
        end(alone)
    both = node_on(bed, two, one)
    with bed.store() as store:
        assert values(store, replaced + put_anew) == [b"new"] * len(replaced + put_anew)
        assert values(store, removed) == [None] * len(removed)
        lost = values(store, kept).count(None)
        assert lost <= len(kept) // 4  # the filter may name a key that did not change
    counters = both.metrics()
    assert counters["ssd_directories_away"] == 0
    assert counters["ssd_void_objects"] >= len(replaced + put_anew + removed)
    assert counters["integrity"]


def test_directories_that_were_never_used_together_do_not_make_one_node(bed: Bed, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    old = node_on(bed, two)
    with bed.store() as store:
        put(store, range(20))
    end(old)
    new = node_on(bed, one)
    with bed.store() as store:
        assert store.put("k3", content(1000), replace=True) == STORED
    end(new)
    with pytest.raises(Error, match="or were never used together; remove moonpool"):
        _native.Server(
            str(bed.socket),
            [("default", 32 * MIB)],
            TOKEN,
            node_settings(),
            ssd=[(str(one), 32 * MIB), (str(two), 32 * MIB)],
        )
    (two / "moonpool.ssd").unlink()
    node_on(bed, one, two)
    with bed.store() as store:
        assert values(store, ["k3", "k4"]) == [content(1000), None]


def test_old_bytes_of_a_group_do_not_come_back_when_they_were_being_written(
    bed: Bed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("needs a C compiler")
    library, flag = tmp_path / "slow_disk.so", tmp_path / "slow"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", str(library), "-ldl"],
        input=SLOW_DISK.encode(),
        check=True,
    )
    monkeypatch.setenv("LD_PRELOAD", str(library))
    monkeypatch.setenv("SLOW_FLAG", str(flag))
    node = bed.node(ssd_io="threads", ssd_clean_share=1.0)
    monkeypatch.delenv("LD_PRELOAD")
    first, second = content(1), content(2)
    with bed.store() as store:
        flag.touch()
        # The second is larger than a segment: it is never written, and so the group may go at any time.
        store.put(["k", "l"], [first, os.urandom(2 * MIB)], groups=["g", "g"])
        until(lambda: node.metric("ssd_writing") == 1)
        number = 0
        while store.stat("k") is not None:
            number += 1
            assert number < 1000
            store.put(f"x{number}", os.urandom(BLOCK))
        assert store.put("k", second) == STORED
        flag.unlink()
        until(lambda: node.metric("ssd_writing") == 0 and node.metric("ssd_dirty_objects") == 0)
        assert values(store, ["k"]) == [second]
        for i in range(200):  # an arena and a half: it is evicted
            store.put(f"y{i}", os.urandom(BLOCK))
        assert values(store, ["k"])[0] in (second, None)
    assert node.is_sound()
