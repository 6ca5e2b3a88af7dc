"""The process of one HUD environment: `python -m everburn.hud.served PATH --env NAME`.

hud's server, in a process that imports hud under Everburn's rule about keys (package.py).
"""

from hud.environment.server import main

if __name__ == "__main__":
    main()
