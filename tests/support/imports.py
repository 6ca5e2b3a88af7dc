"""Modules that the orchestrator process must not import."""

HEAVY = {
    "torch",
    "numpy",
    "transformers",
    "fireworks",
    "pyarrow",
    "peft",
    "pandas",
    "hud",
    "fastapi",
}
"""Each costs a second or 100 MB, and the orchestrator needs none."""
