"""What a run leaves in its folder, and what is made of it later.

| file | owns |
| --- | --- |
| ids, keys | what history carries instead of data; the keys under which data lies |
| store | files: bytes, digests, atomicity |
| run_folder | the configuration, and whose folder it is |
| ledger, steps | committed optimizer steps, and writing one |
| commands | what a run was told, and how it ended |
| publications, checkpoints | who serves a version; resumable states |
| metrics | figures per step |
| provisioning | the trainer job and the deployment of a run |
| replay, verification, forks | the ledger executed again, checked, and taken over |

Doesn't own rollouts and groups (learning/), or when anything is written (activities/).
"""
