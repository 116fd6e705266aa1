"""Several proxies in front of the same engines: each tells the others what it sends where.

    Scheduler  --InflightFeed-->  wire.Change  --PeerBus (XPUB)-->  the others' PeerBus (SUB)
                                                               -->  RemoteInflight  -->  Instance.books

A policy then sees one line of prefills per engine, whichever proxy filled it. What is exchanged is what is in
flight; each proxy listens to the engines' events itself, and learns its models from its own requests.
"""
