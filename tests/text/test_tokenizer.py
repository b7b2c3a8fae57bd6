from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from radixrt.errors import InvalidRequest, ModelLoadError
from radixrt.text import Tokenizer
from radixrt.types import TextPiece
from tests.support.tokenizers import JSON_MERGES, byte_tokenizer, save_tokenizer, sentencepiece_tokenizer

BYTE = byte_tokenizer(extra=JSON_MERGES, chat=True)
TOKENIZERS = {
    "byte": BYTE,
    "sentencepiece": sentencepiece_tokenizer(extra=["the ", " the", "日本"]),
    "no prefix": sentencepiece_tokenizer(extra=["the ", " the", "日本"], prepend=False),
}
# Pieces of text that stand near control tokens, and parts of them.
SCRAPS = st.sampled_from(
    [
        "<|im_start|>",
        "<|im_end|>",
        "<s>",
        "</s>",
        "<|im_",
        "end|>",
        "<",
        "s>",
        " ",
        "  ",
        "\n",
        "the",
        "日本",
        "🙂",
        "\u2581",
    ]
)
TEXT = st.lists(SCRAPS | st.text(max_size=4), max_size=6).map("".join)


def plain(text: str) -> str:
    """Give the text without anything that could become a control token."""
    return text.replace("<", "(").replace(">", ")").replace("|", "!")


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return TOKENIZERS[request.param]


def test_bytes_of_every_token_are_exact() -> None:
    assert BYTE.vocab_bytes[:256] == tuple(bytes([byte]) for byte in range(256))
    assert BYTE.vocab_bytes[256:259] == (b"", b"", b"")
    assert "日本語".encode() in BYTE.vocab_bytes
    sentencepiece = TOKENIZERS["sentencepiece"]
    assert sentencepiece.vocab_bytes[:3] == (b"", b"", b"")
    assert sentencepiece.vocab_bytes[3:259] == tuple(bytes([byte]) for byte in range(256))
    assert b" the" in sentencepiece.vocab_bytes


def test_special_and_end_tokens() -> None:
    assert BYTE.special_ids == {256, 257, 258}
    assert (BYTE.bos_id, BYTE.eos_ids) == (256, (257, 258))
    assert BYTE.token_text(257) == "<|im_end|>"
    assert BYTE.token_text(65) == "A"
    assert BYTE.vocab_size == len(BYTE.vocab_bytes)


@given(TEXT)
def test_decoding_an_encoding_gives_the_text_back(text: str) -> None:
    for tokenizer in TOKENIZERS.values():
        normalized = plain(text).replace("\u2581", " ")
        ids = tokenizer.encode_continuation(plain(text))
        expected = plain(text) if tokenizer is BYTE else normalized
        assert tokenizer.decode(ids) == expected


def test_control_tokens_are_parsed_by_encode_only() -> None:
    assert BYTE.encode("a<|im_end|>") == [97, 257]
    assert 257 not in BYTE.encode_continuation("a<|im_end|>")
    assert BYTE.decode([97, 257, 98]) == "ab"
    assert BYTE.decode([0xE6, 0x97]) == "\ufffd"


@settings(max_examples=200)
@given(st.lists(st.tuples(TEXT, st.booleans()), max_size=5))
def test_pieces_encode_as_the_joined_text_when_content_has_no_control_token(
    parts: list[tuple[str, bool]],
) -> None:
    for tokenizer in TOKENIZERS.values():
        pieces = [TextPiece(text if is_template else plain(text), is_template) for text, is_template in parts]
        joined = "".join(piece.text for piece in pieces)
        merged = "".join(piece.text if piece.is_template else "\0" for piece in pieces)
        is_forged = any(
            token in joined and token not in merged for token in ("<s>", "</s>", "<|im_end|>", "<|im_start|>")
        )
        if not is_forged:
            assert tokenizer.encode_pieces(pieces) == tokenizer.encode(joined, add_special_tokens=False)


@settings(max_examples=200)
@given(st.lists(st.tuples(TEXT, st.booleans()), max_size=5))
def test_content_never_becomes_a_control_token(parts: list[tuple[str, bool]]) -> None:
    for tokenizer in TOKENIZERS.values():
        pieces = [TextPiece(text, is_template) for text, is_template in parts]
        without = [piece if piece.is_template else TextPiece("\u00a0") for piece in pieces]
        specials = [i for i in tokenizer.encode_pieces(pieces) if i in tokenizer.special_ids]
        assert specials == [i for i in tokenizer.encode_pieces(without) if i in tokenizer.special_ids]


@given(TEXT, TEXT, TEXT)
def test_forged_text_encodes_as_plain_text_between_real_control_tokens(a: str, b: str, c: str) -> None:
    """The masked way, taken when content holds a control token, equals the fast way on every other part."""
    for tokenizer in TOKENIZERS.values():
        control = "</s>" if tokenizer is not BYTE else "<|im_end|>"
        pieces = [
            TextPiece(control, True),
            TextPiece(plain(a)),
            TextPiece(control, True),
            TextPiece(plain(b) + control + plain(c)),
        ]
        ids = tokenizer.encode_pieces(pieces)
        end_id = tokenizer.encode(control, add_special_tokens=False)[-1]
        assert ids.count(end_id) == 2
        honest = tokenizer.encode(control + plain(a) + control, add_special_tokens=False)
        assert ids[: len(honest)] == honest
        assert control in tokenizer.decode(ids)


def test_bos_is_added_where_the_model_wants_it() -> None:
    sentencepiece = TOKENIZERS["sentencepiece"]
    assert sentencepiece.encode("a")[0] == sentencepiece.bos_id
    assert sentencepiece.encode("a", add_special_tokens=False)[0] != sentencepiece.bos_id
    assert sentencepiece.bos_id not in sentencepiece.encode_pieces([TextPiece("a")])


def test_lone_surrogates_are_refused(tokenizer: Tokenizer) -> None:
    for encode in (tokenizer.encode, tokenizer.encode_continuation):
        with pytest.raises(InvalidRequest, match="surrogate"):
            encode("a\ud800")
    with pytest.raises(InvalidRequest, match="surrogate"):
        tokenizer.encode_pieces([TextPiece("\ud83d"), TextPiece("\ude42")])


def test_a_saved_tokenizer_reads_back_the_same(tokenizer: Tokenizer, tmp_path: Path) -> None:
    save_tokenizer(tokenizer, tmp_path)
    again = Tokenizer.from_folder(tmp_path)
    assert again.fingerprint == tokenizer.fingerprint
    assert again.vocab_bytes == tokenizer.vocab_bytes
    assert (again.bos_id, again.eos_ids, again.special_ids) == (
        tokenizer.bos_id, tokenizer.eos_ids, tokenizer.special_ids,
    )  # fmt: skip
    assert (again.chat is None) == (tokenizer.chat is None)
    assert again.encode("<s>a 日本") == tokenizer.encode("<s>a 日本")


def test_end_ids_of_all_files_count_but_ordinary_tokens_do_not(tmp_path: Path) -> None:
    save_tokenizer(BYTE, tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 258}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [2, 256]}))
    assert Tokenizer.from_folder(tmp_path).eos_ids == (256, 257, 258)


def test_template_files_win_over_the_config(tmp_path: Path) -> None:
    save_tokenizer(BYTE, tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    chat = Tokenizer.from_folder(tmp_path).chat
    assert chat is not None
    assert chat.source == "{{ messages[0].content }}"


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_corrupt_files_are_named(name: str, tmp_path: Path) -> None:
    save_tokenizer(BYTE, tmp_path)
    (tmp_path / name).write_text("{")
    with pytest.raises(ModelLoadError, match=name):
        Tokenizer.from_folder(tmp_path)


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json is missing"):
        Tokenizer.from_folder(tmp_path)


def test_tokenizers_that_lose_spaces_are_refused() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(ModelLoadError, match="byte-level"):
        Tokenizer(backend)
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ModelLoadError, match="WordPiece"):
        Tokenizer(backend)


def test_ordinary_tokens_of_the_template_are_not_forged() -> None:
    """Some models declare the markers of their template as ordinary added tokens."""
    backend = tokenizers.Tokenizer.from_str(BYTE.serialized())
    backend.add_tokens(["<User>", "<other>"])
    tokenizer = Tokenizer(backend, chat_template="{% for m in messages %}<User>{{ m.content }}{% endfor %}")
    user_id = tokenizer.encode("<User>")[0]
    assert tokenizer.encode_pieces([TextPiece("<User>", True), TextPiece("<User>")]).count(user_id) == 1
    assert len(tokenizer.encode_pieces([TextPiece("<other>")])) == 1


def test_other_threads_run_while_a_long_text_is_encoded() -> None:
    tokenizer = byte_tokenizer(chat=True)
    text = "lorem ipsum " * 60_000

    def encode() -> None:
        tokenizer.encode(text)
        tokenizer.encode_pieces([TextPiece("<|im_end|>", True), TextPiece(text), TextPiece("<|im_end|>")])
        tokenizer.encode_continuation(text)
        is_done.set()

    def num_ticks() -> int:
        ticks = 0
        is_done.clear()
        thread = threading.Thread(target=encode)
        thread.start()
        while not is_done.wait(0.001):
            ticks += 1
        thread.join()
        return ticks

    is_done = threading.Event()
    # Held up: about 6, between the encodings. A busy machine may keep this thread waiting in some of the tries.
    assert any(num_ticks() > 40 for _ in range(10))
