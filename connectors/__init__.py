"""Plugins that put Moonpool under an engine: one folder per engine, none imported by the core, no engine
imported outside its folder. Shared by all of them:

    options     which node, and whose blocks
    objects     how KV is cut into objects by heads
    identity    what goes into a fingerprint
    weights     which weights an engine serves
"""
