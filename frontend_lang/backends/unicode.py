"""Python text that is no Unicode: lone surrogates, as odd file names and broken JSON leave them."""

from __future__ import annotations

from frontend_lang.backends.values import InvalidRequest


def is_unicode(text: str) -> bool:
    """Tell whether a text can be sent and saved. Pure."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_unicode(text: str, parameter: str) -> None:
    """Raise InvalidRequest for a text that is no Unicode. Pure."""
    if not is_unicode(text):
        raise InvalidRequest(
            f"{parameter} must be valid Unicode (it holds a lone surrogate)", parameter=parameter, value=text
        )


def escaped(text: str) -> str:
    r"""Give a text that can be shown and saved: a lone surrogate becomes \udc80 and the like. Pure."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()
