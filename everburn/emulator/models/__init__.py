"""The emulator's models: base models, how they are made and kept, and promoted ones.

Doesn't own any task's recipe: the examples bring theirs.
"""
