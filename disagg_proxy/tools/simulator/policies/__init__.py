"""What other routers do, in their own terms, to be compared in one simulation or behind one proxy.

Each is written from what its project documents and publishes, with its documented defaults; a user of one of
them gets our loads and index under it, which are exact where theirs are guesses.
"""
