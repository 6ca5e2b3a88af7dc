"""The frozen lake: its maps, its moves, its plain text, and what its base model is shown."""

import random
from itertools import islice

import pytest

from everburn.agentic import Reply
from everburn.emulator.models.vocabulary import Vocabulary
from examples.frozen_lake.base_model import LOOKS, best_move, blind_move, recipe, walk
from examples.frozen_lake.lake import GOAL, MOVES, START, Map, Walk, step
from examples.frozen_lake.task import STEPS, parse, render, rows

PLAIN = Map(("SFHF", "FFFH", "HFFF", "FFFG"))
SEEDS = range(300)


def test_a_seed_always_gives_the_same_map_of_four_by_four() -> None:
    for seed in SEEDS:
        found = Map.of_seed(seed)
        assert found == Map.of_seed.__wrapped__(Map, seed)
        assert [len(row) for row in found.rows] == [4, 4, 4, 4]
        text = "".join(found.rows)
        assert set(text[1:-1]) <= {"F", "H"} and text[0] + text[-1] == "SG"
    assert len({Map.of_seed(seed) for seed in SEEDS}) > 200


def test_every_map_has_a_path_that_fits_the_moves() -> None:
    for seed in SEEDS:
        player = Walk(Map.of_seed(seed))
        while not player.is_over and len(player.moves) < STEPS:
            player.move(best_move(player))
        assert player.at_goal, player.map
        assert len(player.moves) == player.map.distances[START]


def test_distances_go_around_holes() -> None:
    snake = Map(("SFFF", "HHHF", "FFFF", "FHHG"))
    assert snake.distances[START] == 6
    assert (1, 0) not in snake.distances
    assert Map(("SHFF", "HFFF", "FFFF", "FFFG")).distances.get(START) is None


def test_moves_stay_on_the_map() -> None:
    assert {move: step((1, 1), move) for move in MOVES} == {
        "LEFT": (1, 0),
        "DOWN": (2, 1),
        "RIGHT": (1, 2),
        "UP": (0, 1),
    }
    assert step(START, "UP") == step(START, "LEFT") == START
    assert step(GOAL, "DOWN") == step(GOAL, "RIGHT") == GOAL


def test_a_walk_ends_in_a_hole_or_at_the_goal() -> None:
    player = Walk(PLAIN)
    assert player.view() == "PFHF\nFFFH\nHFFF\nFFFG"
    player.move("RIGHT")
    assert player.view() == "SPHF\nFFFH\nHFFF\nFFFG"
    assert not player.is_over
    player.move("RIGHT")
    assert (player.is_over, player.at_goal) == (True, False)

    lucky = Walk(PLAIN)
    for move in ("DOWN", "RIGHT", "DOWN", "DOWN", "RIGHT", "RIGHT"):
        assert not lucky.is_over
        lucky.move(move)
    assert (lucky.is_over, lucky.at_goal) == (True, True)


def test_rows_are_always_the_same_and_held_out_maps_are_in_no_training_row() -> None:
    training, held_out = rows(96), rows(128, held_out=True)
    assert (training, held_out) == (rows(96), rows(128, held_out=True))
    assert len(training) == 96 and len(held_out) == 128
    maps = {Map.of_seed(row["seed"]) for row in training}
    assert maps.isdisjoint(Map.of_seed(row["seed"]) for row in held_out)


def test_plain_text() -> None:
    messages = [
        {"role": "user", "content": Walk(PLAIN).view()},
        {"role": "assistant", "content": "DOWN"},
    ]
    assert render(messages) == "PFHF/FFFH/HFFF/FFFG/DOWN\n"
    (call,) = parse("DOWN").tool_calls
    assert (call.name, call.arguments, call.problem) == ("lake_move", {"direction": "DOWN"}, None)


@pytest.mark.parametrize("text", ["", "DOWNDOWN", "SFFF/", "down"])
def test_what_is_no_move_is_a_call_that_cant_be_run(text: str) -> None:
    reply = parse(text)
    assert isinstance(reply, Reply)
    assert reply.tool_calls[0].problem == "it names no direction"


def test_the_base_model_is_shown_walks_over_other_maps_in_its_own_words() -> None:
    vocabulary = Vocabulary(recipe().vocabulary)
    for demonstration in islice(recipe().stream(), 200):
        assert vocabulary.encode("".join(text for text, _ in demonstration))
        assert all(text.removesuffix("\n") in MOVES for text, learned in demonstration if learned)
        first = demonstration[0][0].replace("P", "S", 1).split("/")[:4]
        assert not Map(tuple(first)).is_held_out


def test_its_walkers_look_now_and_then() -> None:
    """Where looking and not looking differ, they look as often as they should."""
    rng, looked = random.Random(0), []
    for seed in range(600):
        player = Walk(Map.of_seed(seed))
        for text, learned in walk(player.map, rng):
            if learned:
                if best_move(player) != blind_move(player):
                    looked.append(text.strip() == best_move(player))
                player.move(text.strip())
    assert abs(sum(looked) / len(looked) - LOOKS) < 0.05
