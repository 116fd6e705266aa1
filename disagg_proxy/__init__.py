"""The proxy: one HTTP address in front of many engines that speak the OpenAI API.

Bytes are moved by the data plane in C++ (``core/csrc/relay``, ``_native.Relay``): one thread that serves all
sockets and asks Python once a request where it goes. Here is what is not per byte: settings, the choice
(``dispatcher.py``, ``conductor/``), health checks, the proxy's own pages and metrics. It is not an HTTP
framework, and parses no request in Python unless a policy looks at prompts.

Start at ``server.serve``; docs/proxy.md has the map, the limits, the metrics and what happens when things
fail.
"""
