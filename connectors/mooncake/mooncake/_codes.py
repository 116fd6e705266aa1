"""Return codes: the numbers that callers compare with, and the one table from moonpool's errors to them.

A method that returns a code logs the sentence of the error under the logger "mooncake", at most once a second
for each method and kind of error, since callers see only the number.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from enum import IntEnum
from typing import ParamSpec

from moonpool.core.errors import (
    AuthError,
    Closed,
    ConfigError,
    CorruptObject,
    Error,
    Forked,
    InvalidArgument,
    ProtocolError,
    Timeout,
    TransferError,
    Unavailable,
)

P = ParamSpec("P")
logger = logging.getLogger("mooncake")

SAY_AGAIN_S = 1.0
KINDS_MAX = 1024  # kinds of warnings that are remembered
SAID_EACH_TIME = ("setup", "initialize")  # what is called seldom


class Code(IntEnum):
    """The codes of the original's API; 0 is success, all others are below 0."""

    OK = 0
    INTERNAL_ERROR = -1
    SEGMENT_NOT_FOUND = -101
    NO_AVAILABLE_HANDLE = -200
    INVALID_PARAMS = -600
    ILLEGAL_CLIENT = -601
    OBJECT_NOT_FOUND = -704
    TRANSFER_FAIL = -800
    CHECKSUM_MISMATCH = -801
    RPC_FAIL = -900
    RPC_TIMEOUT = -901
    UNAVAILABLE_IN_CURRENT_STATUS = -1010
    UNAVAILABLE_IN_CURRENT_MODE = -1011
    FILE_NOT_FOUND = -1100
    TASK_NOT_FOUND = -1400
    JOB_NOT_FOUND = -1402


# What a method that returns codes answers with a code. Any other exception goes through, such as a TypeError
# for a mistake of the caller.
CODED = (Error, OSError, MemoryError)


class NoNode(Unavailable):
    """The pool has no node with room for this tenant yet."""


class Unsupported(Error):
    """Moonpool has nothing that does this."""


# The first row whose class fits decides.
TABLE: tuple[tuple[type[BaseException], Code], ...] = (
    (NoNode, Code.NO_AVAILABLE_HANDLE),
    (Unsupported, Code.UNAVAILABLE_IN_CURRENT_MODE),
    (CorruptObject, Code.CHECKSUM_MISMATCH),
    (TransferError, Code.TRANSFER_FAIL),
    (AuthError, Code.ILLEGAL_CLIENT),
    (InvalidArgument, Code.INVALID_PARAMS),
    (ConfigError, Code.INVALID_PARAMS),
    (Timeout, Code.RPC_TIMEOUT),
    (ProtocolError, Code.RPC_FAIL),
    (Unavailable, Code.RPC_FAIL),
    (Closed, Code.INTERNAL_ERROR),
    (Forked, Code.INTERNAL_ERROR),
    (FileNotFoundError, Code.FILE_NOT_FOUND),
    (Exception, Code.INTERNAL_ERROR),
)

_said: dict[tuple[str, str], float] = {}


def code_of(error: BaseException, operation: str) -> Code:
    """The code of an error of ``operation``, whose sentence goes to the log."""
    say(operation, type(error).__name__, f"{operation}: {error}")
    return next(code for kind, code in TABLE if isinstance(error, kind))


def coded(operation: str, *, floor: int | None = None) -> Callable[[Callable[P, int]], Callable[P, int]]:
    """Decorates a method that returns a code: what it raises becomes the code of ``operation``, or ``floor``
    where that is higher."""

    def decorate(method: Callable[P, int]) -> Callable[P, int]:
        @functools.wraps(method)
        def call(*args: P.args, **kwargs: P.kwargs) -> int:
            try:
                return int(method(*args, **kwargs))
            except CODED as error:
                code = int(code_of(error, operation))
                return code if floor is None else max(code, floor)

        return call

    return decorate


def say(operation: str, kind: str, sentence: str) -> None:
    """Logs a warning, unless the same text was logged a moment ago."""
    now_s = time.monotonic()
    if operation in SAID_EACH_TIME or now_s - _said.get((operation, kind), -SAY_AGAIN_S) >= SAY_AGAIN_S:
        if len(_said) >= KINDS_MAX:
            _said.clear()
        _said[operation, kind] = now_s
        logger.warning("%s", sentence)
