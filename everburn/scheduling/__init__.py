"""The scheduler as pure state machines: admission, cursor, queue, breaker, gauges.

Each is a pydantic model: its fields are its whole state, which a workflow carries through
continue-as-new, and its methods are the transitions. None knows of time, tasks or Temporal;
workflows drive them.
"""
