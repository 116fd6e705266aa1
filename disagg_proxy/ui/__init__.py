"""The page at /ui: the state of the proxy and the reasons of its decisions, for people.

    Scheduler --Observer--> History.on_finish   a tuple into a ring, on the thread that decides; a request
                                                costs nothing else
    History.gather  (event loop, 4 x a second)  sums of 5 s, the last requests, predicted and observed
    snapshot.py     (event loop, on request)    JSON at /ui/data
    page.html       one self-contained file; fetches the JSON every 2 s

All of it is bounded in size. It keeps no text, no token and no header of any request.
"""
