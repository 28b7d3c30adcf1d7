"""What the documentation tells users to type, read from its code blocks."""

from __future__ import annotations

import re
import shlex


def commands(text: str, start: str) -> list[list[str]]:
    """The commands of a page's code blocks that begin with `start`, in words."""
    found = []
    for block in re.split(r"^```.*\n", text, flags=re.MULTILINE)[1::2]:
        if not re.search(f"^{re.escape(start)} ", block, re.MULTILINE):
            continue  # of another language, perhaps
        command = ""
        for line in block.replace("\\\n", " ").splitlines():
            command += line + "\n"
            if command.count("'") % 2 == 0:  # else it goes on within quotes
                found.append(shlex.split(command, comments=True))
                command = ""
    return [words for words in found if words[: len(start.split())] == start.split()]
