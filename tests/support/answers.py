"""Right and unparsable answers to one product, on which all graders of it must agree."""

RIGHT = 15637837
READABLE = ["15637837", "text:\n15,637,837", "\n\n15637837\n\n", "+15,637,837", "  15637837  "]
UNREADABLE = [
    "the answer is 15637837",
    "15637837,",
    r"\boxed{15637837}",
    "15637837 7",
    "15637837\nthat's it",
    "0.15637837",
    "1e15637837",
    "15,63,7837",
    "",
]
