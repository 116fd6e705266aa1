"""Parts of the benchmarks of GPU memory."""
