"""The scheduler as pure state machines: admission, cursor, queue, breaker, gauges.

Each is a pydantic model: its fields are its whole state, carried through continue-as-new; its
methods are the transitions. None knows of time, tasks or Temporal.
"""
