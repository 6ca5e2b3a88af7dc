"""The emulator's HTTP application: its server, its routes, and the form of what they carry.

Doesn't own what a request does (service.py, training/, sampling/).
"""
