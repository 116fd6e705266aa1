"""Conductor: decides which engine serves a request. Pure: requests, engines and ``now`` in, a choice out.

No sockets, no clocks, no event loop; the proxy's event loop calls it, once a request. The simulator runs the
same code.
"""
