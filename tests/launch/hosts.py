"""A configuration of moonpool up for two hosts."""

from __future__ import annotations

TWO_HOSTS = """
[up]
proxy = false
master = true
backoff_initial_s = 0.05
[master]
listen = "127.0.0.1:0"
http = "127.0.0.1:0"
[node]
dram = "64MiB"
http = "127.0.0.1:0"
listen = "127.0.0.1:0"
[[up.node]]
name = "a"
host_id = "host a"
[[up.node]]
name = "b"
host_id = "host b"
"""
