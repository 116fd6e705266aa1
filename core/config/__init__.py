"""Settings: from the command line, the environment and a TOML file.

sections, proxy_section   what can be set: each setting with its type, default, bounds, unit and help
setting                   what a setting is, and how its definition is read
config, config_sources    all settings of one process, and where each value comes from
schema                    the schema and the tables that are made of the settings
units, arena_size         sizes, durations, shares of the memory that is available
paths                     the runtime folder, sockets, where tokens lie
cluster_token             the secrets of a token, and the file that it is followed in
file_state                whether a file is another one than before
logs                      what a process writes to standard error
foreign_variables         MOONPOOL_ variables that no part reads
"""
