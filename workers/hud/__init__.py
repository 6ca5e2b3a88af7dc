"""`everburn hud`: training on HUD tasks without a configuration file.

cli reads the command line, recipe makes a configuration of it, files writes what came out. Doesn't
own the environments (everburn/hud/).
"""
