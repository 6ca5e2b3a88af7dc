"""Processes and the command line: what a person starts."""
