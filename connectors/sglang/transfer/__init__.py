"""What SGLang servers hand to each other, over moonpool's transfer engine and pool: the KV of a prompt from
prefill to decode (PD), embeddings from encoder to language model (EPD), and the cache of embeddings.
docs/sglang_pd.md is its manual.

    hook         puts our class where SGLang has its own, and stops a server in which that cannot be done
    engine       the class: SGLang's methods over one moonpool.TransferEngine
    memory       which ranges are registered, how often, and whether the CPU can reach them at all
    embeddings   the embedding cache's store
    settings     the variables of the environment, checked

Nothing here runs in a server that did not ask for it. Threads: SGLang's, which wait in the native engine.
"""
