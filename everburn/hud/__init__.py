"""HUD environments as rollouts: tasks as dataset rows, a task's run as a completion.

A configuration names `everburn.hud.tasks:rows` as its dataset and
`everburn.hud.rollouts:make_rollout_fn` as its rollout. Needs the extra `hud`, whose first import
takes about two seconds.
"""

from everburn.hud.package import import_hud

# Before any module of this package does it: by itself, hud looks for a key in several places.
import_hud()
