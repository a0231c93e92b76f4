import os
SET = {}
def knob(name, default):
    value = SET.get(name, os.environ.get(name))
    if value is None:
        return default
    numbers = tuple(map(int, str(value).split(",")))
    return numbers if len(numbers) > 1 else (numbers[0] or None if name.endswith("R") else numbers[0])
