"""LMCache beside its own remote backends. engine.py runs in the interpreter that has LMCache, one process for
each backend; servers.py starts what a backend needs; rows.py makes the table."""
