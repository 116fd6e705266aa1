"""The proxy: one HTTP address in front of many engines that speak the OpenAI API.

It reads a whole request, lets a policy choose an engine, sends the request there and moves the answer back as
bytes. It is not an HTTP framework and knows nothing of tokens, prompts or KV blocks: what chooses
(``conductor/``) is pure and gets ``now`` as an argument; what moves bytes (``http/``, ``upstream.py``,
``relay.py``, ``client_connection.py``) never decides. One process, one thread, one event loop (uvloop); every
object here belongs to that loop.

Start at ``server.serve``; docs/proxy.md has the map, the limits, the metrics and what happens when things
fail.
"""
