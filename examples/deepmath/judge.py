"""The math_verify process: a question a line on stdin, a verdict a line on stdout."""

import json
import sys


def agrees(answer: str, truth: str) -> bool:
    """Whether math_verify takes the answer for the truth."""
    from math_verify import parse, verify

    # Its own time limits need signals, which are of no use here: who asks has one.
    gold = parse(f"${truth}$", parsing_timeout=None)
    given = parse(f"${answer}$", parsing_timeout=None)
    return bool(verify(gold, given, timeout_seconds=None))


def main() -> None:
    for line in sys.stdin:
        question = json.loads(line)
        try:
            verdict = agrees(question["answer"], question["truth"])
        except Exception:
            # What it can't read it can't agree with.
            verdict = False
        print(json.dumps(verdict), flush=True)


if __name__ == "__main__":
    main()
