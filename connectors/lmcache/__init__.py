"""LMCache over the pool: its remote connector, its native L2 client and its L2 adapter. docs/lmcache.md is
the manual.

    plugin            what LMCache loads by itself, for ``remote_url: moonpool://`` and {"type": "moonpool"}
    in_tree           the modules that appear inside LMCache's own packages for that
    adapter_entry     how LMCache finds the remote connector, and which engines may have one
    remote_connector  chunks between LMCache's host memory and the pool, for in-process engines
    native            the native L2 client, for LMCache's server: no GIL between its memory and the pool
    adapter           the L2 adapter, for LMCache's server: a locked key is pinned in the pool
    layout_check      what the chunks of this engine look like
    zero_copy         chunks in place, as LMCache's memory objects
    parallel_chunks   one batch by several threads
    locks             which keys are pinned, and when a pin ends
    listing           which chunks the pool has, for LMCache's listings
    job_queue         the threads of the L2 adapter
    chunk_format      the header before the bytes of a chunk, so that none is read as another type
    identity          fingerprints and names: whose chunks these are
    vllm_engine       what the vLLM around LMCache computes with
    settings          node, tenant and options, from a URL or from LMCache's options
    pool              the connection to the node

Nothing here is imported before LMCache asks for it.
"""
