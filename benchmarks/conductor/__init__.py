"""Parts of benchmarks.index that run in a Python of their own."""
