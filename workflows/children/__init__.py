"""What TrainRun starts: a prompt group, a trainer lease, an evaluation.

provisioning waits for a trainer job and gives it back; retries is how an activity of user code has
ended, and when it is begun again. Doesn't own when a child is started (run/).
"""
