"""What Moonpool's speed claims rest on: scripts that anyone can run, beside the systems it is compared with.

    python -m benchmarks.store_vs_peers     the store beside Mooncake, Redis, memcached and memcpy
    python -m benchmarks.transfer_vs_peers  the transfer engine beside Mooncake, NIXL and plain sockets
    python -m benchmarks.engine_overhead    what the connector costs a vLLM scheduler step
    python -m benchmarks.engine_ttft        time to first token from a warm pool
    python -m benchmarks.gpu_engine         the same on a CUDA card, beside vLLM's OffloadingConnector; decode

README.md says how to run them, RESULTS.md holds the last full run. Nothing in moonpool imports this package,
and no test asserts its figures.
"""
