"""One argument that cannot be meant, in each place of each method: the answers of the original, one a line.

answers.txt has JSON: the method, its arguments (as Python writes them; AT is registered memory, C a
ReplicateConfig), what the wheel of 0.3.13.post1 answered. "held" and "held2" are there, "new" and
"new2" are not.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mooncake.store import ReplicateConfig

import moonpool

LINES = Path(__file__).with_name("answers.txt").read_text().splitlines()
CALLS = [(method, arguments, answer) for method, arguments, answer in map(json.loads, LINES)]
# Ours differs on purpose: by method and the argument that is told apart; what it answers instead.
KEPT: dict[tuple[str, str], Any] = {
    ("remove_by_regex", "''"): -600,  # it would remove everything
    ("unmount_segment", "['x']"): -600,
    ("unmount_segment", "['1-2']"): -600,
    ("unmount_and_free_segment", "['x']"): -600,
    ("unmount_and_free_segment", "['1-2']"): -600,
    # Memory that is none is refused, for its own key alone; a row that is wrong leaves the others.
    ("batch_put_from", "[AT,0]"): [0, -600],
    ("batch_upsert_from", "[AT,0]"): [0, -600],
    ("batch_put_from_multi_buffers", "[[AT],[0]]"): [0, -600],
    ("batch_put_from_multi_buffers", "[[AT],[]]"): [0, -600],
    ("batch_put_from_multi_buffers", "[[AT],[AT,AT]]"): [0, -600],
    ("batch_put_from_multi_buffers", "[[8],[]]"): [0, -600],
    ("batch_put_from_multi_buffers", "[[8],[8,8]]"): [0, -600],
    ("batch_get_into_multi_buffers", "[[8],[8,8]]"): [8, -600],
    **{
        (method, argument): -600
        for method in ("put_from", "upsert_from")
        for argument in ("0", "'k'*70000")  # an address, a size; a key has at most 65,536 bytes
    },
    ("put", "'k'*70000"): -600,
    ("upsert", "'k'*70000"): -600,
}
METHODS = sorted({method for method, _, _ in CALLS})


def plain(answer: Any) -> Any:
    """As the lines have it."""
    if answer is None or isinstance(answer, (bool, int, str)):
        return answer
    if isinstance(answer, bytes):
        return f"bytes {len(answer)}"
    if isinstance(answer, (list, tuple)):
        return [plain(one) for one in answer]
    if isinstance(answer, dict):
        return {str(key): plain(value) for key, value in answer.items()}
    return type(answer).__name__


def shape(answer: Any) -> Any:
    """What a caller must be ready for: an exception, a code, a list of so many codes, a value."""
    if isinstance(answer, dict) and "raises" in answer:
        return "raises"
    if isinstance(answer, list):
        return [shape(one) for one in answer]
    return type(answer).__name__


def is_as(answer: Any, wanted: Any) -> bool:
    """The same codes and values. Where the original raises, an exception, or a code that says no; or a value,
    where it only tells types apart that Python does not.
    """
    if shape(wanted) != "raises":
        return shape(answer) == shape(wanted) and (not isinstance(wanted, (int, list)) or answer == wanted)
    return shape(answer) == "raises" or isinstance(answer, (int, list))


@pytest.mark.parametrize("method", METHODS)
def test_answers_of_the_original(store: Any, method: str) -> None:
    array = np.zeros(1 << 16, np.uint8)
    names = {"AT": array.ctypes.data, "C": ReplicateConfig()}
    store.register_buffer(array.ctypes.data, array.nbytes)
    wrong = []
    try:
        for _, arguments, wanted in [call for call in CALLS if call[0] == method]:
            store.batch_remove(["new", "new2"])
            for key in ("held", "held2"):
                store.upsert(key, b"12345678")
            try:
                answer = plain(getattr(store, method)(*[eval(one, names) for one in arguments]))
            except (TypeError, moonpool.Error) as error:
                answer = {"raises": type(error).__name__}
            kept = next((KEPT[method, one] for one in arguments if (method, one) in KEPT), None)
            if answer != kept and not is_as(answer, wanted):
                text = f"{method}({', '.join(arguments)}): {json.dumps(answer)}"
                wrong.append(f"{text}, there {json.dumps(wanted)}")
    finally:
        store.unregister_buffer(array.ctypes.data)
    assert not wrong, "\n".join(wrong)
