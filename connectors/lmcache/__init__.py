"""LMCache over the pool: its remote connector, its native L2 client and its L2 adapter. docs/lmcache.md is
the manual.

    plugin     what LMCache loads by itself, so that ``remote_url: moonpool://`` and {"type": "moonpool"} work
    in_tree    the modules that appear inside LMCache's own packages for that
    remote     how LMCache finds the remote connector, and which engines may have one
    remote_connector
               chunks between LMCache's host memory and the pool, for in-process engines
    native     the native L2 client, for LMCache's server: no GIL between its memory and the pool
    adapter    the L2 adapter, for LMCache's server: a locked key is pinned in the pool
    expected   what the chunks of this engine look like
    lent       chunks in place, as LMCache's memory objects
    pieces     one batch by several threads
    locks      which keys are pinned, and when a pin ends
    lanes      the threads of the L2 adapter
    form       what stands before the bytes of a chunk, so that none is taken for another's
    identity   fingerprints and names: whose chunks these are
    vllm_engine
               what the vLLM around LMCache computes with
    settings   where the node is and whose chunks are wanted, from a URL or from LMCache's options
    pool       the connection to the node: made as soon as there is one

Nothing here is imported before LMCache asks for it.
"""
