"""The end of a command: any error becomes one sentence and an exit code."""

from __future__ import annotations

import errno
import os
import re
import sys
import traceback
from collections.abc import Callable

from moonpool.core.errors import AuthError, ConfigError, Error, InvalidArgument
from moonpool.core.printable import printable

EXIT_MISS = 1
EXIT_USAGE = 2
EXIT_UNAVAILABLE = 3
EXIT_BUG = 70
EXIT_INTERRUPTED = 130

_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)  # errors that the user can correct


def guarded(run: Callable[[], object]) -> int:
    """Calls ``run``; returns its result, or the exit code for what it raises, with one sentence on standard
    error."""
    try:
        code = run()
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except Error as error:
        return _report(error, str(error), EXIT_USAGE if _is_ours_to_fix(error) else EXIT_UNAVAILABLE)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the flush at exit complains
        return 0
    except OSError as error:
        if error.errno not in _DISK:
            return _bug(error)
        place = error.filename or "the output"
        return _report(
            error, f"cannot write {place}: {error.strerror}; make room or choose another place", EXIT_USAGE
        )
    except Exception as error:
        return _bug(error)


def _bug(error: Exception) -> int:
    message = f"internal error: {type(error).__name__}: {error}; MOONPOOL_DEBUG=1 shows where"
    return _report(error, message, EXIT_BUG)


def _is_ours_to_fix(error: Error) -> bool:
    return isinstance(error, ConfigError | InvalidArgument | AuthError)


def _report(error: Exception, message: str, code: int) -> int:
    if os.environ.get("MOONPOOL_DEBUG") == "1":
        traceback.print_exception(error)
    lines = (printable(line) for line in message.split("\n"))  # it may contain a peer's text
    print(_with_one_prefix("\n".join(lines)), file=sys.stderr)
    return code


def _with_one_prefix(message: str) -> str:
    """The message behind "moonpool: " or "moonpool SUBCOMMAND: ", whatever part of that it begins with."""
    return re.sub(r"^(?:moonpool:? )?(?:(proxy|mock-engine): )?", _prefix, message, count=1)


def _prefix(found: re.Match[str]) -> str:
    return f"moonpool {found[1]}: " if found[1] else "moonpool: "
