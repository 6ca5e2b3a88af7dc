"""Processes: workers that serve workflows and activities, and the command line.

processes serves a role; plugin sets up clients and workers; connection connects to a Temporal
server; environment, dotenv, signals, exits and errors are shared by all processes. cli/ is the
command `everburn`, stack/ the local stack, hud/ the commands for HUD.
"""
