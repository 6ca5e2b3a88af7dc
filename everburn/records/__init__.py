"""The files in a run's folder, and their later uses.

| file | owns |
| --- | --- |
| ids, keys | names and references that history carries instead of data; the keys of files |
| store | files: bytes, digests, atomicity |
| run_folder | the configuration, and the folder's owner |
| ledger, steps | committed optimizer steps, and writing one |
| commands | commands to a run, and how it ended |
| publications, checkpoints | the sampler of each version; resumable states |
| metrics | figures per step |
| provisioning | the trainer job and the deployment that a run rents |
| replay, verification, forks | the ledger executed again, checked, and copied |

Doesn't own rollouts and groups (learning/), or when files are written (activities/).
"""
