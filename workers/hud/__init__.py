"""`everburn hud`: training on HUD tasks without a configuration file.

cli defines the commands, recipe the options and the configuration made of them, files the output
folder. Doesn't own the environments (everburn/hud/).
"""
