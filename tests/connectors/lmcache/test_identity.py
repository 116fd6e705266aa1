from __future__ import annotations

from moonpool.connectors.lmcache.identity import NAME_BYTES_MAX, fingerprint, layout_mark, name_of


def test_a_name_is_the_key_until_it_is_too_long() -> None:
    key = "org/model@2@1@-4ffc01@bfloat16"
    assert name_of(key) == key
    long = "ü" * NAME_BYTES_MAX
    assert name_of(long) != name_of(long + "x")
    assert len(name_of(long).encode()) < NAME_BYTES_MAX


def test_every_field_counts() -> None:
    fields = {"model": "m", "chunk_tokens": 256, "kv_dtype": "bfloat16", "kv_shape": [8, 2, 256, 8, 128]}
    marks = {fingerprint("remote", fields), fingerprint("l2", fields)}
    for key, value in (("model", "n"), ("chunk_tokens", 128), ("kv_dtype", "float16"), ("kv_shape", [8])):
        marks.add(fingerprint("remote", {**fields, key: value}))
    assert len(marks) == 6
    assert {len(mark) for mark in marks} == {32}


def test_layouts_of_equal_size_differ() -> None:
    class Dtype:
        def __str__(self) -> str:
            return "torch.bfloat16"

    assert layout_mark([(2, 8)], [Dtype()]) == layout_mark([[2, 8]], ["bfloat16"])
    assert layout_mark([(2, 8)], ["bfloat16"]) != layout_mark([(2, 8)], ["float16"])
    assert layout_mark([(2, 8)], ["bfloat16"]) != layout_mark([(8, 2)], ["bfloat16"])
