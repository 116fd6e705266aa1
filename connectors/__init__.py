"""Plugins that put Moonpool under an engine: one folder per engine, none imported by the core, no engine
imported outside its folder. Shared by all of them: ``weights`` (which weights an engine serves)."""
