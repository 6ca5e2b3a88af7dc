"""The cash register's tasks: 192 different pairs of prices."""

import random

from env import total

PRICES = range(10, 100)

pairs = random.Random(7).sample([(a, b) for a in PRICES for b in PRICES], 192)
tasks = [total(first=first, second=second) for first, second in pairs]
