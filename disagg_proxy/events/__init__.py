"""KV events of engines and of the pool's nodes, from their ZMQ streams into the prefix indexes.

    settings.py    which streams there are
    stream.py      one stream's order: gaps, replays, restarts, repeats. No socket, no clock
    stream_link.py        what is known of one stream
    subscriber.py  the thread with the sockets
    stream_watch.py       which streams are heard, and warnings of those that are not
    prefix_indexes.py     which index a stream belongs to: one of each model and block size

A stream is believed for as long as it is without a hole. When something is lost that a replay cannot bring
back, all of its holder is forgotten and learned anew. docs/events.md has formats and rules.
"""
