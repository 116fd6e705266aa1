"""Prefix caches of one instance, by what they evict when they are full.

All keep whole blocks by id and take a prompt's blocks from the last one back to the first, so that of equals
the end of a chain is evicted before its beginning. ``moonpool simulate cache`` compares them, and any but the
clairvoyant one can be the cache of a simulated instance (``--eviction``).
"""
