"""Several proxies in front of the same engines: each sends the others its requests in flight.

    Scheduler  --InflightFeed-->  wire.Change  --PeerBus (XPUB)-->  the others' PeerBus (SUB)
                                                               -->  RemoteInflight  -->  Worker.load

So a policy sees one queue of prefills for each engine, whichever proxy filled it. Only requests in flight are
exchanged; each proxy subscribes to the engines' events itself, and trains its models on its own requests.
"""
