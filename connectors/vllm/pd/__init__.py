"""The hand-over between prefill and decode engines: decode reads the KV that prefill computed straight out of
its memory, over ``moonpool.TransferEngine``. docs/vllm.md is the manual.

    kv_transfer_params   what engines tell each other through the proxy, parsed and made
    leases               the blocks that prefill keeps for a decode engine, and until when; pure
    producer_scheduler   prefill's half in the scheduler's process
    consumer_scheduler   decode's half in the scheduler's process
    handover             both, behind one interface for the scheduler's half
    step_plan            what those halves tell the worker each step

    lease_table          the memory that a worker lets others read: its KV layout and the valid leases
    rank_pairs           which prefill workers each decode worker reads from, by tensor-parallel sizes
    peers                the same with addresses, from an offer or from the bootstrap page
    copy_ranges          two engines' layouts -> the ranges to read
    wire                 the messages between the workers of two engines
    producer_worker      prefill's half beside the memory; pure: messages in, messages out
    incoming             a request at a decode worker, in one part for each prefill worker
    consumer_worker      decode's half beside the memory; pure as well
    peer_connection      the connection to a worker of another engine, with a thread of its own
    handover_worker      puts those together in a worker

    bootstrap            GET /query, where decode engines find a prefill engine in the concurrent form

    neighbour_asks       what engines tell each other about blocks of their own caches
    neighbour_offers     the asked engine's half: which blocks are there, held, and when it answers
    neighbour_queries    the asking engine's half: asks on threads, and a deadline

No engine ever writes into another's memory. Decode reads, then checks that the lease is still valid. Prefill
invalidates a lease before its blocks are used again, so decode notices bytes that were overwritten and
computes them instead. Hence a lease may end at any moment, and a dead, hung or lying peer can cost a
recompute and nothing else.

Threads: the scheduler's halves run on the scheduler's thread. In the worker, one thread receives messages and
one thread for each peer reads; the engine's own threads never wait for them.
"""
