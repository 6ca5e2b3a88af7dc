"""The user's functions: how they are found, and where they run.

Owns entry points, the loop and the threads of user code, and its time limits. Doesn't own the
purpose of a call (rollouts/, learning/, trainers/).
"""
