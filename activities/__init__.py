"""Side effects of the workflows: thin, retryable, each a few lines over the domain.

Modules here import nothing heavy at the top, since workflow modules import them for names and
types: what needs numpy, torch or the SDK is imported on first use, inside the domain.
"""
