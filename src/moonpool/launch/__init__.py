"""Starts processes and keeps them running: nodes, a master, engines and the proxy of one host.

up, up_plan       what `moonpool up` runs, and the plan that a configuration gives
detached          `up -d`: the same in the background, once it is up
down              ends what `up` runs
log_files         the logs of what it runs, read and followed
supervisor        starts, watches, restarts and ends processes
held_ports        ports that are reserved for a process before it starts
vllm_command      the command line of `vllm serve` with the pool
sglang_command    the command line of an SGLang server with the pool
snapshot          what runs on this host, for `moonpool status`
"""
