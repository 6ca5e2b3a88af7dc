"""Processes: those that serve workflows and activities, and those that people start.

processes serves a role; plugin sets up clients and workers; connection reaches a Temporal server;
environment, dotenv, signals, exits and errors are what every process needs. cli/ is the command
`everburn`, stack/ the local stack, hud/ the commands for HUD.
"""
