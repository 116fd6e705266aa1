"""Discovery: sources list the engines, the reconciler makes the proxy's fleet equal to that list.

    source (file, HTTP, etcd, Kubernetes) --full list, each time--> membership --join, leave--> fleet

A source knows nothing of the proxy: it reports full lists, or why it cannot (``source.py``).
``membership.py`` decides which engines join and leave; it is pure, with the time as an argument.
``reconciler.py`` carries that out. All of it runs on the proxy's event loop. docs/discovery.md has the
formats.
"""
