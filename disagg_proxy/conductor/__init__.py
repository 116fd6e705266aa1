"""Conductor: decides which engine serves a request. Pure: no sockets, no clocks, no event loop.

``scheduler.py`` is its interface: it takes requests, observations and the time, and returns what the proxy is
to do. It owns admission (``admission_controller.py``, ``admission.py``), the queue (``wait_queue.py``), the
policy (``policies/``) and the load accounting of requests in flight (``inflight.py``). The proxy and the
simulator drive the same scheduler.
"""
