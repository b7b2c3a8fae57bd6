"""EngineBackend: requests out, chunks in from the engine's thread, aborts on cancellation."""

import asyncio
import threading
import time

import pytest

from frontend_lang import EngineBackend, ProgramError, gen, program, select, set_default_engine, user
from radixrt import (
    DeviceError,
    FinishReason,
    InvalidRequest,
    Mailbox,
    OutputChunk,
    SamplingParams,
    TextPiece,
    TokenLogprob,
    Usage,
)
from tests.support.tokenizers import sentencepiece_tokenizer

pytestmark = pytest.mark.timeout(60)


class CharacterTokenizer:
    eos_ids = (1,)
    chat = None

    def encode(self, text):
        return [0, *map(ord, text)]

    def encode_pieces(self, pieces):
        return [ord(character) for piece in pieces for character in piece.text]

    def encode_continuation(self, text):
        return [ord(character) for character in text]

    def decode(self, token_ids):
        return "".join(chr(token_id) for token_id in token_ids if token_id > 1)


class ThreadedEngine:
    """Answer "ab" in two chunks from another thread, after a delay."""

    def __init__(self, *, delay_s=0.0, error=None):
        self.tokenizer = CharacterTokenizer()
        self.delay_s = delay_s
        self.error = error
        self.requests = []
        self.aborted = []
        self.threads = []
        self.open_scopes = set()

    def scope(self):
        self.open_scopes.add(len(self.open_scopes))
        return OpenScope(self.open_scopes, len(self.open_scopes) - 1)

    def mailbox(self):
        return Mailbox(asyncio.get_running_loop(), Mailbox.wake)

    def submit(self, request, deliver):
        if request.sampling.temperature == 99:
            raise InvalidRequest("too hot", parameter="temperature", value=99)
        self.requests.append(request)
        thread = threading.Thread(target=self._answer, args=(request, deliver))
        self.threads.append(thread)
        thread.start()
        return Ticket(self.aborted, len(self.requests) - 1)

    def _answer(self, request, deliver):
        time.sleep(self.delay_s)
        if self.error is not None:
            deliver(self.error)
            return
        start = max(request.logprob_start, 1)
        asked = request.prompt_ids[start:] if request.sampling.prompt_logprobs is not None else ()
        logprobs = tuple(TokenLogprob(token_id, -float(token_id)) for token_id in asked)
        usage = Usage(prompt_tokens=len(request.prompt_ids), output_tokens=3)
        deliver(OutputChunk(0, "a", (97,), prompt_logprobs=logprobs))
        deliver(OutputChunk(0, "b", (98, 1), finish_reason=FinishReason.STOP, usage=usage))


class OpenScope:
    def __init__(self, open_scopes, scope_id):
        self._open_scopes, self.scope_id = open_scopes, scope_id

    def close(self):
        self._open_scopes.discard(self.scope_id)


class Ticket:
    def __init__(self, aborted, index):
        self._aborted, self._index = aborted, index

    def abort(self):
        self._aborted.append(self._index)


@program
def ask(s):
    s += "Q" + gen("x", max_tokens=5)
    s += "?"


def test_a_program_runs_on_an_engine():
    engine = ThreadedEngine(delay_s=0.01)
    result = ask.with_options(engine=engine).run()
    assert (result["x"], result.text()) == ("ab", "Qab?")
    assert result.token_ids() == (0, *map(ord, "Qab?"))  # one BOS, no EOS
    assert engine.requests[0].prompt_ids == (0, ord("Q"))
    assert engine.requests[0].sampling == SamplingParams(max_tokens=5)
    assert engine.requests[0].label == "x"
    assert result.usage == Usage(prompt_tokens=2, output_tokens=3)
    assert engine.aborted == []


def test_the_default_engine_serves_programs_that_name_none():
    set_default_engine(ThreadedEngine())
    try:
        assert ask.run()["x"] == "ab"
    finally:
        set_default_engine(None)


def test_an_error_of_the_engine_reaches_the_reader():
    with pytest.raises(ProgramError, match="DeviceError: out of memory") as caught:
        ask.with_options(engine=ThreadedEngine(error=DeviceError("out of memory"))).run()
    assert isinstance(caught.value.__cause__, DeviceError)


def test_a_refused_request_names_the_call():
    @program
    def hot(s):
        s += "Q" + gen("x", temperature=99)

    with pytest.raises(ProgramError, match=r'gen\("x"\) failed at .*InvalidRequest: too hot'):
        hot.with_options(engine=ThreadedEngine()).run()


def test_a_model_without_a_chat_template_is_told():
    @program
    def chatting(s):
        s += user("hi")

    with pytest.raises(ProgramError, match=r"user\(...\) failed at .*no chat template"):
        chatting.with_options(engine=ThreadedEngine()).run()


def test_cancelling_aborts_the_ticket_and_late_chunks_do_no_harm():
    engine = ThreadedEngine(delay_s=0.2)

    async def main():
        task = asyncio.ensure_future(ask.with_options(engine=engine).arun())
        while not engine.requests:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert engine.aborted == [0]
    for thread in engine.threads:
        thread.join()  # it delivers to a closed loop


def test_select_scores_each_choice_behind_the_shared_prefix():
    @program
    def judge(s):
        s += "Q" + select("x", choices=["ab", "c"])

    engine = ThreadedEngine()
    result = judge.with_options(engine=engine).run()
    assert [request.prompt_ids for request in engine.requests] == [(0, 81, 97, 98), (0, 81, 99)]
    assert {request.logprob_start for request in engine.requests} == {2}
    wanted = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    assert [request.sampling for request in engine.requests] == [wanted, wanted]
    assert result["x"] == "ab"  # mean -97.5 against -99
    assert result.token_ids() == (0, 81, 97, 98)


def test_score_gives_the_logprobs_of_the_continuation_only():
    async def main():
        return await EngineBackend(ThreadedEngine()).score([0, 5], [[7, 8], [9]])

    scored = asyncio.run(main())
    assert [score.logprobs for score in scored] == [(-7.0, -8.0), (-9.0,)]


@pytest.mark.parametrize("prepend", [True, False])
def test_text_after_a_value_is_not_given_a_space(prepend):
    engine = ThreadedEngine()
    engine.tokenizer = sentencepiece_tokenizer(prepend=prepend)
    backend = EngineBackend(engine)
    start = backend.encode([TextPiece("ab")], is_start=True)
    assert backend.decode(start) == (" ab" if prepend else "ab")
    assert backend.decode(backend.encode([TextPiece("ab")], is_start=False)) == "ab"
    assert backend.bos_ids == (engine.tokenizer.bos_id,)
