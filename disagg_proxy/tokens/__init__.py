"""Token ids of prompts that come as text.

Ids are bytes: packed u32, little-endian, the input of block hashes. A prompt whose ids are not known in time
is routed without its prefix, never refused. ``engine_source`` asks an engine, which is exact and costs a
request; ``local_source`` renders the chat template and tokenises in threads of the proxy.
"""
