"""Settings: from the command line, the environment and a TOML file.

config, config_sources, config_help    what can be set, where a value comes from, what it means
units, arena_size                      sizes, durations, shares of the memory that is available
paths                                  the runtime folder, sockets, tokens
logs                                   what a process writes to standard error
foreign_variables                      MOONPOOL_ variables that no part reads
"""
