"""The page at /ui: what the proxy sees, and why it decided as it did, for people.

    Accounts._ended -> History.ended     a tuple into a ring, on the thread that decides: all that a request
                                         pays for the page
    History.gather  (event loop, 4 x a second)  sums of 5 s, the last requests, predicted and observed
    data.py         (event loop, when asked)    JSON at /ui/data
    page.html       one file, nothing from elsewhere; asks for the JSON every 2 s

Everything is bounded. It holds no text, no token and no header of any request.
"""
