"""Where a statement of a program stands."""

import inspect


def place(program, text):
    """Give "file:line" of the first source line of a program that holds `text`."""
    lines, first = inspect.getsourcelines(program.function)
    path = inspect.getsourcefile(program.function)
    return f"{path}:{first + next(index for index, line in enumerate(lines) if text in line)}"
