"""Workflows: run/ is TrainRun and its parts, children/ what it starts.

messages is what they tell each other, queues where their work waits, reset_guard the refusal of an
execution that was reset, restore a run's state rebuilt from its folder.
"""
