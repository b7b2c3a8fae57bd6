"""Text to token ids and back: tokenizer, chat template, detokenizer."""

from radixrt.text.chat import ChatTemplate
from radixrt.text.detokenizer import Detokenizer
from radixrt.text.stopping import TextDelta
from radixrt.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "Detokenizer", "TextDelta", "Tokenizer"]
