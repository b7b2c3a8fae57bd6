"""Prompts in our own terms: segments of text marked as template or content, or token ids."""

from __future__ import annotations

from collections.abc import Sequence

from radixrt.server.reading import Body
from radixrt.text.tokenizer import Tokenizer
from radixrt.types import TextPiece


class Segment(Body):
    """A piece of prompt text.

    Attributes:
        is_template: control tokens in it mean themselves; in content they are plain characters.
    """

    text: str
    is_template: bool = False


def encode_segments(tokenizer: Tokenizer, segments: Sequence[Segment], *, is_start: bool) -> list[int]:
    """Encode segments as one text, or as the continuation of one. Takes a text's length of time.

    Raises:
        InvalidRequest: a lone surrogate.
    """
    if is_start or any(segment.is_template for segment in segments):
        return tokenizer.encode_pieces([TextPiece(item.text, item.is_template) for item in segments])
    return tokenizer.encode_continuation("".join(segment.text for segment in segments))
