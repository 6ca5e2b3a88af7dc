"""One of Everburn's processes with named points in it.

python -m chaos.process ARGUMENTS    as `everburn ARGUMENTS`
"""

import sys

from chaos import kill_points
from workers.cli.app import main

if __name__ == "__main__":
    kill_points.install()
    match sys.argv[1:3]:
        case ["worker", "trainer"]:
            kill_points.install_for_trainer()
        case ["emulator", *_]:
            kill_points.install_for_emulator()
    main()
