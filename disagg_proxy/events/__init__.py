"""KV events of engines and of the pool's nodes, from their ZMQ streams into the prefix indexes.

    settings.py          the streams and their limits
    stream.py            order of one stream: gaps, replays, restarts, repeats. No socket, no clock
    stream_link.py       the sockets and the state of one stream
    subscriber.py        the thread with the sockets
    stream_watch.py      the state of each stream, and warnings
    prefix_indexes.py    one prefix index for each block size

The blocks of a stream count as long as it has no gap. When messages are lost that a replay cannot supply, the
holder's blocks are removed and read again. docs/events.md has formats and rules.
"""
