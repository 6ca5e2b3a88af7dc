"""The math_verify process: one question per line on stdin, one verdict per line on stdout."""

import json
import sys


def agrees(answer: str, truth: str) -> bool:
    """Whether math_verify considers the answer equal to the truth."""
    from math_verify import parse, verify

    # Without its own time limits, which need signals: the caller has one.
    gold = parse(f"${truth}$", parsing_timeout=None)
    given = parse(f"${answer}$", parsing_timeout=None)
    return bool(verify(gold, given, timeout_seconds=None))


def main() -> None:
    for line in sys.stdin:
        question = json.loads(line)
        try:
            verdict = agrees(question["answer"], question["truth"])
        except Exception:
            # An answer that can't be parsed is wrong.
            verdict = False
        print(json.dumps(verdict), flush=True)


if __name__ == "__main__":
    main()
