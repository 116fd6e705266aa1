"""What the Makefile calls: make environments, build, lint, test, run the demo.

Runs with the machine's own Python 3.11 and its standard library only, since nothing else is there yet. Every
file is one step: progress (what the user sees), system_packages (apt), engine_choice (which vLLM),
environments (cached virtual environments), units (which sources are compiled together), build, lint, test,
demo.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036  that is what this is for
    sys.exit(
        f"moonpool needs Python 3.11 or newer, not {sys.version.split()[0]}; `make PYTHON=python3.11 ...`"
    )
