"""Whether our top-level packages are ours.

`workflows`, `activities` and `workers` are names that other projects use too: llama-index-workflows
installs a `workflows`. Imports nothing of Everburn, so that it works when another is in the way.
"""

import importlib.util
from importlib.metadata import packages_distributions
from pathlib import Path

OUR_PACKAGES = ("everburn", "workflows", "activities", "workers")
OUR_FOLDER = Path(__file__).resolve().parents[1]


def intruders() -> dict[str, str]:
    """What is in the place of our packages, by name, with what to do; empty if all is well."""
    found = {}
    for name in OUR_PACKAGES:
        place = _place_of(name)
        if place == OUR_FOLDER / name:
            continue
        others = [other for other in packages_distributions().get(name, []) if other != "everburn"]
        by = f", installed by {', '.join(others)}," if others else ""
        found[name] = (
            f"{place or 'nothing'}{by} is in the place of {OUR_FOLDER / name}: use an environment "
            "of its own for Everburn, and no folder of this name on PYTHONPATH"
        )
    return found


def _place_of(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)
    places = list(spec.submodule_search_locations or []) if spec is not None else []
    return Path(places[0]).resolve() if places else None
