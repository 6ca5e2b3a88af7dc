"""TrainRun: the scheduler and the step transaction, the only owner of a run's state.

| file | owns |
| --- | --- |
| train_run | a run from start to end, and its messages |
| state | what continue-as-new carries, one model per writer |
| live_config | the current configuration |
| parts | what the stages below share |
| start, step, recovery, shutdown | the stages: first lease, a step, a failed lease, the end |
| batch, step_metrics | a step's submissions; its metrics |
| producer, evaluations | rows in flight; when to evaluate |
| session, checkpoints | the current lease; saving the trainer's state |
| recorder | every write to ledger, commands and metrics |
| watchdog | lost reports, dead children, stalls |
| ui | status, result, and Temporal's pages |
"""
