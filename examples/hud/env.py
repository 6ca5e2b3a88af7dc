"""A cash register as a HUD environment: the total price of two items, without working.

An ordinary HUD environment: it runs under `hud eval` as it is, independently of Everburn.
"""

import re

from hud.graders import EvaluationResult

from hud import Environment

env = Environment(name="till")


@env.template()
async def total(first: int, second: int):
    """The price of two items."""
    answer = yield f"{first}+{second}="
    yield grade(answer, first + second)


def grade(answer, price):
    """The price alone scores 1, the price after written working 0.2."""
    text = str(answer or "").strip()
    numbers = re.findall(r"\d+", text)
    got = int(numbers[-1]) if numbers else None
    brief = text == str(price)
    reward = 1.0 if brief else 0.2 if got == price else 0.0
    return EvaluationResult(
        reward=reward, content=text, info={"expected": price, "got": got, "brief": brief}
    )
