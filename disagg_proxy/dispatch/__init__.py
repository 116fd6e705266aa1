"""From a request to a plan, and what is kept of it until it is over. Runs on the data plane's thread or that
which tokenised the text; observations come back on the event loop as well.

    dispatcher.py     one request: the ids of its prompt, the candidates, the policy's choice, the plan
    candidates.py     which engines a request may go to
    locality.py       where the blocks of a prompt lie
    handovers.py      the form in which prefill and decode work together
    accounts.py       the books: what is under way, and what was learnt when it ended

The choice itself is ``conductor/``, which is pure.
"""
