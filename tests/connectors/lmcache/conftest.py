"""Which of these tests this process can run."""

from __future__ import annotations

import importlib.util

# Those need LMCache in this very process; test_real.py runs them where it is.
collect_ignore = [] if importlib.util.find_spec("lmcache") else ["real"]
