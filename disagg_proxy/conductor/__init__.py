"""Conductor: decides which engine serves a request. Pure: no sockets, no clocks, no event loop.

``scheduler.py`` is its door: requests, observations and the time go in, what the proxy is to do comes out. It
owns admission (``admission_controller.py``, ``admission.py``), the queue (``wait_queue.py``), the policy
(``policies/``) and the account of what is under way (``inflight.py``). The proxy and the simulator drive the
same one.
"""
