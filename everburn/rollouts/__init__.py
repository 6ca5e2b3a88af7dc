"""Rollouts: the user's contract, and how the user's function is called.

| file | owns |
| --- | --- |
| contract, validation | what a rollout function receives and returns; the rules it must keep |
| runner | one rollout function of one run in one process |
| sampling, call_log | the sampler; calls that a retry needn't repeat |
| reuse | what earlier attempts have finished |
| sandboxes | what completions make and must not leave behind |
| failures | what an exception means for the run |
| dataset, task, tokenizers | rows, their order, the checks before a run, the tokenizer |
| evaluation, calibration | held-out rows; whether there is anything to learn from |

Doesn't own what a group makes of its rollouts (learning/), or when one is begun (scheduling/,
workflows/).
"""
