"""The KV cache connector for TensorRT-LLM: ``MoonpoolScheduler`` and ``MoonpoolWorker``, which let an engine
keep its KV cache in the pool and take what other engines computed. docs/tensorrt_llm.md is its manual.

    scheduler    the half on rank 0 that asks, promises and plans
    worker       the half on every rank that moves bytes
    link         what the two halves of rank 0 share
    fetch        brings objects of other hosts to the own node before they are promised, within bounds
    layout       where the bytes of a block lie in the engine's memory, as plain values
    kv_memory    that memory as native threads copy it, on the host or on a CUDA device
    saves        the saves under way, and the pages that they still read
    tokens       a request's blocks by their digests
    identity     the fingerprint: which model, weights and form of bytes
    limits       engines and prompts that are left alone
    settings     our options, checked
    pool         the connection to the node: made when there is one, lost and found again
    messages     what the scheduler tells the workers
    compat       every difference between TensorRT-LLM's versions

Threads: the executor's thread calls both halves and waits for one lookup per request, nothing else but,
rarely, a save of a page that the step writes to. Each worker has a thread for loads and a native one for
saves, those of its card (store/device), and one more while the node does not answer. Rank 0 has another for
reads from other hosts.
"""

from moonpool.connectors.tensorrt_llm.scheduler import MoonpoolScheduler
from moonpool.connectors.tensorrt_llm.worker import MoonpoolWorker

__all__ = ["MoonpoolScheduler", "MoonpoolWorker"]
