"""Trainer sessions: what a step does to a remote model, behind one protocol.

| file | owns |
| --- | --- |
| protocol | what a session can do, its results and its errors |
| backends | where each backend's services are, and the key for them |
| serverless | a session of the serverless API, through the SDK |
| dedicated | what differs on a trainer job of the run's own |
| jobs, hotload, fencing | that job and its deployment, what is served, who else may train |
| attached_job | whether a run may begin on a job of others |
| session_opening | a session that comes too late |
| lease | one session made safe to drive by activities that run at least once |
| errors | which of the SDK's errors means what |
| custom_loss | losses in Python |
| send_once | that nothing is applied twice |
| guards | what a session can't do, results that aren't finite, gradients that were lost |
| promotion | a snapshot made a model of the account |
| probe | that the sampler serves what is trained |
| sdk | the SDK, imported lightly |
"""
