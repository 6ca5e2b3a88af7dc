"""The scheduler, as pure state machines: admission, cursor, queue, breaker, gauges.

Each is a pydantic model whose fields are its whole state, so that a workflow can carry it through
continue-as-new, and whose methods are its only transitions. None knows of time, tasks or
Temporal; `workflows/run/producer.py` and `workflows/run/step.py` drive them.
"""
