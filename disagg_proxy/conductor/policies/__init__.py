"""Policies, one class a file. Each chooses among eligible workers: the dispatcher leaves out those that are
dead, whose breaker is open, or that were tried for this request."""
