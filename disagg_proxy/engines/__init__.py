"""One engine behind the proxy, on the Python side: its address, role, models and health, and how a prefill
and a decode engine of its kind connect.

    engine.py                     the state of one engine
    health.py                     periodic checks, on the event loop; the only file here with a socket
    bootstrap.py                  the bootstrap page of a vLLM prefill engine
    bootstrap_conflicts.py        pages that several engines share, or that other hosts cannot reach
    bootstrap_trust.py            whether a page belongs to its engine, by the latency of hand-overs
    sglang.py, tensorrt_llm.py    the server_info and the request fields of these engines

``fleet.py`` and ``discovery/`` decide which engines exist, ``dispatch/`` which of them gets a request.
"""
