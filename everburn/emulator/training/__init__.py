"""The emulator's trainable models: operations, losses, weights, checkpoints.

Doesn't own sessions (sessions.py) or the routes (http/).
"""
