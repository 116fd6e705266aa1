"""Policies, one class a file. Each chooses among the instances that may be chosen now: who is dead, rests or
has been tried for this request is the dispatcher's part."""
