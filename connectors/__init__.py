"""Plugins that put Moonpool under an engine: one folder per engine, none imported by the core, no engine
imported outside its folder. Shared by all of them:

    options          which node, and whose blocks
    node_connection  the connection to the node: absent, joined, silent, and joined again
    blocking_worker  native operations on the calling thread, for engines whose threads may wait
    objects          how KV is cut into objects by heads
    identity         what goes into a fingerprint
    positions        rope, as the engine derives it from its longest sequence
    weights          which weights an engine serves
    adapters         digests of LoRA adapters
    files            digests of files, computed once on a host
"""

if __name__ != "moonpool.connectors":
    raise ImportError(f"import moonpool.connectors: {__name__} would be a second copy of each module")
