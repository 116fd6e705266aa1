"""The core of Moonpool: the store, its node, and everything that no engine and no proxy needs to know about.

Python here is what a person reads and changes (configuration, processes, the command line); what touches
every byte or every block is C++ in csrc/, reached through the one extension module moonpool._native.
"""

if __name__ != "moonpool.core":
    raise ImportError(f"import moonpool.core: {__name__} would be a second copy of each module")
