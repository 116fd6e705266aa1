"""Parts of benchmarks.master: the contenders' processes and their clients."""
