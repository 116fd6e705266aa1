"""LMCache beside its own backends. engine.py (in-process mode) and l2.py (its server's adapters) run in the
interpreter that has LMCache, one process for each backend; backends.py starts what a backend needs."""
