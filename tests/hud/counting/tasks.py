from env import variety

tasks = [variety(start=chr(ord("a") + index)) for index in range(12)]
