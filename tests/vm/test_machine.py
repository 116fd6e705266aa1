"""The virtual machine itself: it starts, runs what was built here, and has soft RoCE on several rails."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.vm.machine import Ended


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_it_runs_what_was_built_here_and_has_rails(guest: Callable[..., Ended]) -> None:
    python = "import moonpool._native as native; print('core', native.__name__)"
    ended = guest(f'rails 2 && rdma link && python -c "{python}"')
    assert ended.output.count("state ACTIVE") == 4
    assert "core moonpool._native" in ended.output
