"""A fictional world: people, their acquaintances, their places of birth and work.

Every question requires two paragraphs: the first names a person, the second a place.
"""

import random
from typing import Any

PEOPLE = (
    *("Ada", "Ben", "Cleo", "Dov", "Edda", "Finn", "Gita", "Hugo", "Ines", "Juno", "Kai", "Lena"),
    *("Mira", "Nils", "Olga", "Pia", "Quin", "Rosa", "Sami", "Tove", "Ugo", "Vera", "Wim", "Zoe"),
)
REGIONS = ("North", "South", "East", "West", "Upper", "Lower")
TOWNS = ("Arden", "Belmar", "Corvo", "Delfin", "Elmet", "Fenwick", "Garda", "Holm")
RELATIONS = ("teacher", "cousin")
FACTS = {
    "was born in": "Where was the {relation} of {person} born?",
    "works in": "Where does the {relation} of {person} work?",
}
SUBJECTS = 3
"""People of a row whose acquaintances are given."""


def row(rng: random.Random) -> dict[str, Any]:
    """A question, its answer and the paragraphs to search: `messages`, `ground_truth`,
    `context`."""
    names = rng.sample(PEOPLE, SUBJECTS * (1 + len(RELATIONS)))
    subjects, others = names[:SUBJECTS], iter(names[SUBJECTS:])
    known = {(person, relation): next(others) for person in subjects for relation in RELATIONS}
    places = {
        (person, fact): f"{rng.choice(REGIONS)} {rng.choice(TOWNS)}"
        for person in known.values()
        for fact in FACTS
    }
    context = [
        *(f"The {relation} of {person} is {other}" for (person, relation), other in known.items()),
        *(f"{person} {fact} {place}" for (person, fact), place in places.items()),
    ]
    rng.shuffle(context)
    (person, relation), other = rng.choice(list(known.items()))
    fact = rng.choice(list(FACTS))
    question = FACTS[fact].format(relation=relation, person=person)
    return {
        "messages": [{"role": "user", "content": question}],
        "ground_truth": places[other, fact],
        "context": context,
    }
