"""One engine behind the proxy, as Python knows it: its address, role and models, whether it is well, and how
a prefill engine and a decode engine of its kind meet.

    engine.py         what is held of one engine
    health.py         asks each again and again, on the event loop; the one file here with a socket
    bootstrap.py      where a prefill engine of vLLM's is met
    bootstrap_conflicts.py     what of other engines matters to that
    bootstrap_trust.py     whether what its page says is believed
    sglang.py, tensorrt_llm.py    what engines of that kind say and want to be told

Which engines there are is ``fleet.py`` and ``discovery/``; what is sent to which is ``dispatch/``.
"""
