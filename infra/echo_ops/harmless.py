"""Foreign text made harmless for a terminal: control characters become visible and have no effect.

A policy or a stranger wrote the text of a trajectory. It may hold escape sequences that clear a screen or set a clipboard, and marks that
reverse the direction of writing and so hide text (CVE-2021-42574).
"""

from __future__ import annotations

import unicodedata

# Control characters, format characters (directions of writing, zero width), lone surrogates, private use.
_SHOWN_AS_CODE = ("Cc", "Cf", "Cs", "Co")
_CONTROL_PICTURES = 0x2400
_DELETE = 0x7F


def harmless(text: str, *, keep_lines: bool = False) -> str:
    r"""`text` with ESC as `␛`, a line's end as `⏎` (or as it is), other invisible characters as `\u202e`."""
    if text.isprintable():
        return text
    return "".join(_shown(character, keep_lines=keep_lines) for character in text)


def _shown(character: str, *, keep_lines: bool) -> str:
    if character.isprintable():
        return character
    if character == "\n":
        return "\n" if keep_lines else "⏎"
    code = ord(character)
    if code < ord(" "):
        return chr(_CONTROL_PICTURES + code)
    if code == _DELETE:
        return "␡"
    category = unicodedata.category(character)
    return f"\\u{code:04x}" if category in _SHOWN_AS_CODE or category.startswith(("Z", "C")) else character
