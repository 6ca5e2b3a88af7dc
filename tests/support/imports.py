"""What the orchestrator's process must not import."""

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
"""Each costs a second or a hundred megabytes; none is an orchestrator's business."""
