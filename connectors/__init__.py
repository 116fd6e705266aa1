"""Plugins that put Moonpool under an engine: one folder per engine, none imported by the core, no engine
imported outside its folder. Shared by all of them:

    options     which node, and whose blocks
    objects     how KV is cut into objects by heads
    identity    what goes into a fingerprint
    positions   rope, and what an engine makes of it by its longest sequence
    weights     which weights an engine serves
    adapters    which bytes a LoRA adapter is made of
    files       what files hold: digests that are made once
"""

if __name__ != "moonpool.connectors":
    raise ImportError(f"import moonpool.connectors: {__name__} would be a second copy of each module")
