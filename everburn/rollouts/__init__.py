"""Rollouts: the user's contract, and how the user's function is called.

| file | owns |
| --- | --- |
| contract, validation | what a rollout function receives and returns; the rules it must keep |
| runner | the completions of one run in one process |
| function | the user's rollout function, loaded for a run |
| attempt, destinations | one call of it and everything around; where its result is written |
| sampling, call_log | the sampler; recorded calls that a retry doesn't repeat |
| reuse | finished work of earlier attempts |
| sandboxes | what completions create and must not leave behind |
| failures | classification of exceptions |
| dataset, task, tokenizers | rows, their order, the checks before a run, the tokenizer |
| evaluation, calibration | held-out rows; whether there is anything to learn from |

Doesn't own groups of rollouts (learning/), or when a rollout starts (scheduling/, workflows/).
"""
