"""The store as a caller sees it: objects of bytes under keys.

store, async_store    the client, blocking and for asyncio
types                 results, presence, copies
buffers               memory that a caller hands in, of any kind of array
keys, patterns        names of objects: digests of token blocks, and matching by * and ?
"""
