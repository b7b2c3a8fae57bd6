"""The token-exact transcript of a branch."""

from __future__ import annotations

from collections.abc import Sequence

from frontend_lang.backends import Backend, TextPiece


class Transcript:
    """Own what was sent and received, as token ids.

    Text waits as pieces until ids are needed and is then encoded once, together with its neighbours. Generated
    ids are kept as they came and never encoded again, so every call's prompt is an exact extension of the last.

        ids: [ encoded text | generated | encoded text | generated ]  pieces: text not yet encoded

    Invariant: an id, once in `ids`, never changes; `text` is all text in order, template included.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._ids: list[int] = []
        self._pieces: list[TextPiece] = []
        self._texts: list[str] = []
        self._messages: list[dict[str, str]] = []
        self._open_role: str | None = None
        self._role_start = 0  # index into _texts of the open message's content
        self._role_suffix = ""

    @property
    def text(self) -> str:
        """Give everything so far as text."""
        return "".join(self._texts)

    @property
    def messages(self) -> list[dict[str, str]]:
        """Give the chat messages so far, the open one included."""
        open_message = [] if self._open_role is None else [self._message(self._open_role)]
        return [dict(message) for message in [*self._messages, *open_message]]

    def token_ids(self) -> tuple[int, ...]:
        """Encode the text that waits and give all ids."""
        if self._pieces:
            is_start = not self._ids
            if is_start and not self._pieces[0].is_template:
                self._ids += self._backend.bos_ids
            self._ids += self._backend.encode(self._pieces, is_start=is_start)
            self._pieces = []
        elif not self._ids:
            self._ids += self._backend.bos_ids
        return tuple(self._ids)

    def add_text(self, text: str, *, is_template: bool = False) -> None:
        """Append text; it is encoded when ids are next needed."""
        if not text:
            return
        self._texts.append(text)
        if self._pieces and self._pieces[-1].is_template == is_template:
            text = self._pieces.pop().text + text
        self._pieces.append(TextPiece(text, is_template))

    def add_generated(self, token_ids: Sequence[int], text: str, *, is_cut: bool = False) -> None:
        """Append generated tokens, which follow `token_ids()`.

        Args:
            is_cut: a stop text may have been cut off, so that the ids say more than `text`: the tokens beyond it
                are dropped, and what a token in the middle of the cut says within `text` becomes text again.
        """
        kept = self._within(token_ids, text) if is_cut else token_ids
        self._ids += kept
        self._texts.append(text)
        if is_cut and (rest := text[len(self._backend.decode(kept)) :]):
            self._pieces.append(TextPiece(rest))

    def open_role(self, role: str) -> None:
        """Begin a chat message; one that is still open (a branch forked inside it) ends first."""
        self.close_role()
        prefix, suffix = self._backend.open_role(self._messages, role)
        self.add_text(prefix, is_template=True)
        self._open_role, self._role_start, self._role_suffix = role, len(self._texts), suffix

    def close_role(self) -> None:
        """End the open chat message, if there is one."""
        if self._open_role is None:
            return
        self._messages.append(self._message(self._open_role))
        self._open_role = None
        self.add_text(self._role_suffix, is_template=True)

    def copy(self) -> Transcript:
        """Give an independent transcript with the same content."""
        other = Transcript(self._backend)
        other._ids, other._pieces, other._texts = list(self._ids), list(self._pieces), list(self._texts)
        other._messages = list(self._messages)
        other._open_role, other._role_start = self._open_role, self._role_start
        other._role_suffix = self._role_suffix
        return other

    def _message(self, role: str) -> dict[str, str]:
        return {"role": role, "content": "".join(self._texts[self._role_start :])}

    def _within(self, token_ids: Sequence[int], text: str) -> Sequence[int]:
        """Give the most leading ids whose text is a start of `text`."""
        for num_kept in range(len(token_ids), 0, -1):
            if text.startswith(self._backend.decode(token_ids[:num_kept])):
                return token_ids[:num_kept]
        return []
