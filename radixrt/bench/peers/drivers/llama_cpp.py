"""llama.cpp through llama-cpp-python. Takes a .gguf file in bfloat16.

Its Python binding has no batches: requests run in turn, as its users run them, and each reuses what it shares with
the one before.
"""

import importlib.metadata
import json
import os

from llama_cpp import Llama, LlamaGrammar


class Peer:
    """One Llama."""

    def __init__(self, model):
        self.version = importlib.metadata.version("llama-cpp-python")
        threads = int(os.environ["OMP_NUM_THREADS"])
        self._llama = Llama(model, n_ctx=4096, n_threads=threads, n_threads_batch=threads, verbose=False)

    def reset(self):
        self._llama.reset()

    def generate(self, prompts, max_tokens):
        return [self._one(ids, count) for ids, count in zip(prompts, max_tokens, strict=True)]

    def _one(self, ids, count):
        output = []
        for token_id in self._llama.generate(ids, temp=0.0):
            output.append(token_id)
            if len(output) == count:
                break
        return output

    def generate_json(self, prompts, schema, max_tokens):
        grammar = LlamaGrammar.from_json_schema(json.dumps(schema), verbose=False)
        answers = (
            self._llama.create_completion(ids, max_tokens=max_tokens, temperature=0.0, grammar=grammar)
            for ids in prompts
        )
        return [answer["choices"][0]["text"] for answer in answers]
