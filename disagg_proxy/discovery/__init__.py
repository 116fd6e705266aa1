"""Where engines come from: sources say which there are, one piece of code makes the proxy's fleet follow.

    source (flags, file, HTTP, etcd, Kubernetes) --the full set, each time--> members --join, leave--> fleet

A source knows nothing of the proxy; it yields full sets (``source.py``), or says that it cannot. What
becomes of them is decided purely, with the time as an argument (``membership.py``), and carried out by
``reconciler.py``. All of it runs on the proxy's event loop. docs/discovery.md has the formats.
"""
