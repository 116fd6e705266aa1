"""How much KV cache a model makes, when fetching it beats computing it, and what a pool of some size would
hold of a trace's prompts. Pure but for ``source.py``, which finds a model's config.json. No engine, no
weights."""
