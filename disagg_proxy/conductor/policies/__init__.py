"""Policies, one class a file. Each chooses among the workers that may be chosen now: the dispatcher leaves
out those that are dead, rest or have been tried for this request."""
