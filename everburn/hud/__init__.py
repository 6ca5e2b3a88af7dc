"""HUD environments as rollouts: a task is a dataset row, a run of a task is a completion.

A configuration names `everburn.hud.tasks:rows` as its dataset and
`everburn.hud.rollouts:make_rollout_fn` as its rollout. Needs the extra `hud`, whose first import
takes about two seconds.
"""

from everburn.hud.package import import_hud

# Before another module imports hud, which by itself reads keys from several places.
import_hud()
