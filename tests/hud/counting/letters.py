def distinct(text):
    return len(set(text or ""))
