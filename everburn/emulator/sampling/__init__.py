"""The emulator's sampler: batched decoding of many requests.

Doesn't own the weights that are sampled from (service.py), or the routes (http/).
"""
