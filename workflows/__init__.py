"""Deterministic orchestration: what happens, in what order. Side effects are activities."""
