"""Sends the requests of a trace to live engines, or to a proxy in front of them, and measures the answers.

    trace -> Arrival -> prompts.py: token ids that share what the trace's prompts share
                     -> sender.py: at its time, so many at once at most
                     -> client.py: one request, its stream read to the end -> Outcome
                     -> results.py, report.py, plots.py

It is no load generator for its own sake: what is sent, when, and which prompts have a prefix in common is the
trace's. One event loop does all of it, so beyond some thousand tokens a second its own time is in the gaps.
"""
