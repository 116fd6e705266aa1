"""Modules that LMCache finds in its own packages; see plugin.py."""
