"""The family of errors: fields, one sentence, the built-in classes beside it, and pickling."""

from __future__ import annotations

import pickle

import pytest

import moonpool
from moonpool.core import errors

FAMILY = [getattr(errors, name) for name in errors.__all__]


@pytest.mark.parametrize("kind", FAMILY)
def test_each_error_is_of_the_family_and_carries_its_fields(kind: type[errors.Error]) -> None:
    cause = OSError(5, "broken")
    error = kind("it broke", operation="get", key=b"k", peer="/run/x.sock", bytes=7, cause=cause)
    assert isinstance(error, moonpool.Error)
    assert str(error) == "it broke"
    assert (error.operation, error.key, error.peer, error.bytes) == ("get", b"k", "/run/x.sock", 7)
    assert error.cause is cause
    assert error.__cause__ is cause


@pytest.mark.parametrize("kind", FAMILY)
def test_fields_are_optional_and_only_by_name(kind: type[errors.Error]) -> None:
    error = kind("it broke")
    assert (error.operation, error.key, error.peer, error.bytes, error.cause) == ("", None, None, None, None)
    with pytest.raises(TypeError):
        kind("it broke", "get")  # type: ignore[call-arg]


@pytest.mark.parametrize("kind", FAMILY)
def test_pickling_keeps_the_fields(kind: type[errors.Error]) -> None:
    error = kind("it broke", operation="put", key="k", peer="p", bytes=3, cause="why")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == "it broke"
    assert (copy.operation, copy.key, copy.peer, copy.bytes, copy.cause) == ("put", "k", "p", 3, "why")


def test_a_transfer_error_says_how_far_it_came() -> None:
    error = errors.TransferError(
        "lost", peer="10.0.0.7:7720", bytes=100, path="tcp 10.0.0.7:7720", bytes_done=60, states=b"\1\2"
    )
    copy = pickle.loads(pickle.dumps(error))
    for one in (error, copy):
        assert type(one) is errors.TransferError
        assert (one.bytes, one.bytes_done, one.states) == (100, 60, b"\1\2")
        assert (one.peer, one.path, one.cause) == ("10.0.0.7:7720", "tcp 10.0.0.7:7720", None)
    bare = errors.TransferError("lost")
    assert (bare.path, bare.bytes_done, bare.states) == (None, 0, b"")


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (errors.Unavailable, ConnectionError),
        (errors.Timeout, TimeoutError),
        (errors.ConfigError, ValueError),
        (errors.InvalidArgument, ValueError),
        (errors.TooLarge, errors.InvalidArgument),
    ],
)
def test_who_knows_only_the_built_in_errors_can_catch_ours(
    kind: type[errors.Error], builtin: type[Exception]
) -> None:
    with pytest.raises(builtin, match="it broke"):
        raise kind("it broke")


def test_the_facade_has_all_of_them() -> None:
    for kind in FAMILY:
        assert getattr(moonpool, kind.__name__) is kind
