"""Reference answers in the forms of mathematical records: GSM8K's `#### 42`, MATH's `\\boxed{42}`, or plain."""

from __future__ import annotations

GSM8K_MARK = "####"
_BOXES = ("\\boxed", "\\fbox")


def last_boxed(text: str) -> str | None:
    """The content of the last \\boxed{…} or \\fbox{…}, braces balanced; also of `\\boxed 7`. None without one, or if it never closes."""
    start, box = max((text.rfind(box), box) for box in _BOXES)
    if start < 0:
        return None
    rest = text[start + len(box) :].lstrip()
    if not rest.startswith("{"):
        word = rest.split(maxsplit=1)[:1]
        return word[0].rstrip("$.") if word else None
    depth, is_escaped = 0, False
    for position, character in enumerate(rest):
        if is_escaped:
            is_escaped = False
        elif character == "\\":
            is_escaped = True
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return rest[1:position]
    return None


def reference_of(text: str, *, is_solution: bool) -> str | None:
    """The answer in a record's field; None without one. A whole solution has one only after `####` or in a box."""
    _, mark, rest = text.rpartition(GSM8K_MARK)
    if mark:
        return rest.strip() or None
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed.strip() or None
    return None if is_solution else text.strip() or None
