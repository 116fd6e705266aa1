"""The hand-over between prefill and decode engines: decode reads the KV that prefill computed straight out of
its memory, over ``moonpool.TransferEngine``. docs/vllm.md is the manual.

    fields       what engines tell each other through the proxy: kv_transfer_params, parsed and made
    leases       the blocks that prefill keeps for a decode engine, and when it gets them back; pure
    producer     prefill's half in the scheduler's process
    consumer     decode's half in the scheduler's process
    handover     both, behind the one door that the scheduler's half uses
    plans        what those halves tell the worker each step

    page         what a worker offers to be read: how its KV memory lies, and which leases are valid
    copies       two engines' layouts -> the ranges to read
    wire         the messages between the workers of two engines
    gives        prefill's half beside the memory; pure: messages in, messages out
    takes        decode's half beside the memory; pure as well
    lines        the connection to one other engine, with a thread of its own for whatever waits
    station      puts those together in a worker

    bootstrap    GET /query, where decode engines find a prefill engine in the concurrent form

No engine ever writes into another's memory. Decode reads, and looks afterwards whether the lease was
still valid: prefill makes a lease invalid before its blocks are used again, so bytes that were overtaken are
noticed and computed instead. Hence a lease may end at any moment, and a dead, hung or lying peer can cost a
recompute and nothing else.

Threads: the scheduler's halves run on the scheduler's thread. In the worker, one thread hears messages, and
one for each peer reads; the engine's own threads never wait for them.
"""
