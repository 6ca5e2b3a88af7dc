"""The local stack: a Temporal server, the emulator and workers, supervised in a folder.

attachment finds or starts a stack for a command; supervisor keeps its processes up; folder holds
the files that both share; ports, temporal_server and temporary_emulator are its parts. Doesn't own
what the workers do (../processes.py).
"""
