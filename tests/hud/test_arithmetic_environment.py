"""The bundled environment: its grader, and its prompts when served."""

import pytest
from hud.agents.base import Agent
from hud.eval import LocalRuntime, rollout
from hud.eval.run import Run

from everburn.hud.rollouts import failure_of
from examples.arithmetic.hud_environment import environment, grade_final_integer
from support.answers import READABLE, RIGHT, UNREADABLE


@pytest.mark.parametrize(
    "answer",
    READABLE,
)
def test_the_right_integer_on_the_last_line_scores(answer: str) -> None:
    grade = grade_final_integer(answer, RIGHT)
    assert (grade.reward, grade.info) == (1.0, {"expected": RIGHT, "got": RIGHT})
    assert grade.content == answer.strip()


def test_a_negative_product_scores() -> None:
    assert grade_final_integer("so\n-12", -12).reward == 1.0
    assert grade_final_integer("-1,200", -1200).reward == 1.0


@pytest.mark.parametrize(
    "answer",
    [
        *UNREADABLE,
        None,
    ],
)
def test_an_unreadable_last_line_scores_nothing(answer: str | None) -> None:
    grade = grade_final_integer(answer, RIGHT)
    assert (grade.reward, grade.info) == (0.0, {"expected": RIGHT, "got": None})


def test_a_wrong_integer_is_distinguished_from_an_unreadable_line() -> None:
    grade = grade_final_integer("15637838", RIGHT)
    assert (grade.reward, grade.info) == (0.0, {"expected": RIGHT, "got": 15637838})


class Says(Agent):
    def __init__(self, answer: str) -> None:
        super().__init__()
        self._answer = answer

    async def __call__(self, run: Run) -> None:
        run.trace.content = self._answer


@pytest.mark.parametrize(
    ("template", "prompt", "answer"),
    [
        (
            "multiply",
            "What is 12 * 34? Work it out, then put the final integer on its own line at the end "
            "of your answer.",
            "12 * 34 is\n408",
        ),
        ("add", "12+34=", "46\n"),
    ],
)
async def test_an_environment_poses_and_grades_a_problem(
    template: str, prompt: str, answer: str
) -> None:
    env = environment()
    task = env.templates[template](a=12, b=34)
    run = await rollout(task, Says(answer), runtime=LocalRuntime(env), job_id="job")
    assert run.prompt == prompt
    assert run.reward == 1.0
    assert failure_of(run) == "it completed without a recorded sample"
