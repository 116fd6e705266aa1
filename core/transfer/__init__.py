"""The transfer engine as a caller sees it: registered memory of one process, read and written by another.

engine, async_engine    the engine, blocking and for asyncio
types                   slices, batches, states, priorities
segment, region         memory of a peer, and memory that this process registers
transfer                a batch on its way
"""
