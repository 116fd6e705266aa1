"""From a request to a plan, and what is kept of it until it is over. Runs on the data plane's thread or that
which tokenised the text; observations come back on the event loop as well.

    dispatcher.py     one request: the ids of its prompt, the candidates, the scheduler's decision, the plan
    intake.py         what the scheduler is told of a request
    pending.py        a request that the scheduler judges, and the answers to those that reach no engine
    candidates.py     which engines a request may go to
    prefix_locator.py where the blocks of a prompt lie
    handovers.py      from a choice to what the data plane carries out: how prefill and decode work together

The decision itself is ``conductor/scheduler.py``, which is pure: admission, queue, choice, accounts.
"""
