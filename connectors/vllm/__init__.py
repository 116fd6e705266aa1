"""The connector ``Mooncake`` for vLLM: real engines whose prefix cache is the pool. docs/vllm.md is its
manual.

    plugin       what vLLM's entry point calls: registers the name
    connector    the class vLLM talks to; delegates, and survives what goes wrong below
    scheduler    the half in the scheduler's process: lookups, pins, what to load and save when
    step_progress
                 which requests a step computes, how far, and in which blocks
    load_decision
                 which loads are worth their time, by measured rates
    step_times   how long the steps take that compute prompts
    tiers        where the bytes of a load come from
    free_block_wait
                 how long an engine without room waits for blocks before it preempts a request
    worker       the half beside the KV memory: layout, loads and saves on native threads
    requests     the life of one request, as a state machine without clocks, sockets or threads
    reach        how far back layers look: which blocks a request needs of a sliding window
    states       layers with a state in the place of KV, and which blocks hold a snapshot of it
    layout       where the bytes of (layer, head, block) lie, as plain values
    engine_config
                 what the connector needs to know about the engine, read once from its configuration
    identity     the fingerprint: which model, weights and form of bytes
    arguments    which of vLLM's arguments change the numbers, and why the others do not
    adapters     LoRA adapters: the digest of the bytes that a request uses
    item_names   images, sounds and videos of requests: their names
    item_hashes  the digests of their content, shared by the connectors of a process
    media_options
                 which of vLLM's options for them count in that digest, and which leave them without a name
    weight_changes
                 which calls of an engine to its workers replace its weights
    weight_hooks what a connector does when they do, of KV and of encoder outputs
    group_blocks KV cache groups whose blocks hold unlike numbers of tokens
    settings     kv_connector_extra_config, checked
    takeover     other connectors' names and options for this one
    pd           the hand-over between prefill and decode engines, a package of its own
    pool         the connection to the node, and the native threads of its operations
    messages     what the halves tell each other
    metrics      counts and latencies, in vLLM's own /metrics
    repeats      logs a repeated failure once a minute
    compat       every difference between vLLM versions

Threads: both halves run on their engine's thread and never block it; the threads of
``moonpool._native.Worker`` move bytes; a NodeConnection owns one Python thread while there is no node, and
ItemNames one once a large image came.
"""
