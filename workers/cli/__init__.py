"""The command `everburn`: one file per command, and what commands share.

app parses the command line. run, resume, fork, verify, calibrate, reap, worker, status, doctor and
dry_run are commands; run_file, preflight, live_checks, runs, stale_code, progress, report and
terminal are shared. Doesn't own the local stack (stack/) or HUD's commands (hud/).
"""
