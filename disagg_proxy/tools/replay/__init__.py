"""Sends the requests of a trace to live engines, or to a proxy in front of them, and measures the answers.

    trace -> Arrival -> prompts.py: token ids that share what the trace's prompts share
          -> sender.py: at its time, at most so many at once
          -> client.py: one request, its stream read to the end -> Outcome
          -> results.py, report.py, plots.py

The trace decides what is sent, when, and which prompts have a prefix in common; for other loads there are
load generators. One event loop does all of it, so beyond some thousand tokens a second its own time adds to
the gaps.
"""
