"""The connector ``Mooncake`` for the outputs of vLLM's encoders (``--ec-transfer-config``): an image, a sound
or a video that one engine has encoded is not encoded again by another one. docs/vllm.md is its manual,
docs/keys.md has the formats.

    names        the names of the connector, and whether an engine's configuration means it
    connector    the class vLLM talks to; delegates, and survives what goes wrong below
    scheduler    the half in the scheduler's process: names items, looks them up, plans loads and saves
    worker       the half beside the encoder: loads and saves; what cannot be loaded is encoded
    membership   the pool under the fingerprint of the encoder, joined when the weights are known
    identity     the fingerprint: which model, weights and form of the outputs
    objects      the bytes of one output: a header and the numbers
    messages     what the halves tell each other
    settings     ec_connector_extra_config, checked
    metrics      counts and latencies, in vLLM's own /metrics
    compat       every difference between vLLM versions in these connectors

Both halves run on their engine's thread. The scheduler's half waits for answers as the KV connector does, at
most 1 ms a step. The worker's half waits for the loads of a step, at most LOAD_TIMEOUT_S. Saves are handed to
a native thread.
"""
