"""What the Makefile calls: make environments, build, lint, test, run the demo.

Runs with the machine's own Python 3.11 and its standard library only, since nothing else is there yet. Every
file is one step: progress (what the user sees), system_packages (apt), engine_choice (which vLLM),
environments (cached virtual environments), build, lint, test, demo.
"""
