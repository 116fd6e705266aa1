"""The KV cache connector for TensorRT-LLM: ``MoonpoolScheduler`` and ``MoonpoolWorker``, which let an engine
keep its KV cache in the pool and take what other engines computed. docs/tensorrt_llm.md is its manual.

    scheduler    the half on rank 0 that asks, promises and plans
    worker       the half on every rank that moves bytes
    link         what the two halves of rank 0 share
    fetch        reads objects of other hosts before they are promised, within bounds
    layout       where the bytes of a block lie in the engine's memory, as plain values
    staging      host memory between the engine's and the pool's, and the movers in and out of it
    tokens       a request's blocks by their digests
    identity     the fingerprint: which model, weights and form of bytes
    limits       engines and prompts that are left alone
    settings     our options, checked
    pool         the connection to the node: made when there is one, lost and found again
    messages     what the scheduler tells the workers
    compat       every difference between TensorRT-LLM's versions

Threads: the executor's thread calls both halves and waits for one lookup per request, nothing else. Each
worker has a thread for loads and one for saves, and a third while the node does not answer. Rank 0 has one
more for reads from other hosts.
"""

from moonpool.connectors.tensorrt_llm.scheduler import MoonpoolScheduler
from moonpool.connectors.tensorrt_llm.worker import MoonpoolWorker

__all__ = ["MoonpoolScheduler", "MoonpoolWorker"]
