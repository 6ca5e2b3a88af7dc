"""TrainRun: the scheduler and the step transaction, the only owner of a run's state.

| file | owns |
| --- | --- |
| train_run | a run's life and messages |
| state, live_config | what is carried from execution to execution; what a run goes by |
| start, session, recovery | the first lease, a lease in use, and coming back after one was lost |
| producer, step, evaluations | rows in flight, the order within a step, when to evaluate |
| recorder | every write to ledger, commands and metrics |
| watchdog | lost reports, dead children, a run that stands still |
| shutdown | everything after the last step |
| ui | what Temporal's pages show |
"""
