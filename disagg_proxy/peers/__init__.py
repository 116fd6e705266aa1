"""Several proxies in front of the same engines: each tells the others what it sends where.

    Accounts  --changed-->  wire.Change  --link.Link (XPUB)-->  the others' Link (SUB)  -->  shared.Shared
                                                                                          -->  Instance.books

A policy then sees one line of prefills per engine, whichever proxy filled it. What is exchanged is what is in
flight; each proxy listens to the engines' events itself, and learns its models from its own requests.
"""
