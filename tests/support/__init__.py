"""Shared test support: a farm of real workers, and scripts that determine what a run does."""
