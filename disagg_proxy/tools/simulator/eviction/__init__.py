"""Prefix caches of one instance, by how they choose what goes when there is no room.

All keep whole blocks by id and take a prompt's blocks from the last one back to the first, so that of equals
a chain's end goes before its beginning. ``moonpool simulate cache`` compares them, and any but the
clairvoyant one can be the cache of a simulated instance (``--eviction``).
"""
