"""Rollouts of several turns: token assembly, rendering, a tool loop, an endpoint for harnesses."""
