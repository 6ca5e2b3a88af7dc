"""Chaos: real processes die, freeze and misbehave at named points, and every run is audited.

A fast subset runs with all tests; the whole of it by `make chaos`.
"""
