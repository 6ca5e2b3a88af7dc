"""Trainer sessions: the operations of a step on a remote model, behind one protocol.

protocol.py has the operations, results and errors; serverless.py and dedicated.py implement it;
lease.py makes a session safe to drive by activities that run at least once.
"""
