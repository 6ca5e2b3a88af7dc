"""The user's functions: how they are found, and where they run.

Owns entry points, the loop and the threads of user code, and its deadlines. Doesn't own what a
function is called for (rollouts/, learning/, trainers/).
"""
