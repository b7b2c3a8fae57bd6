"""transformers' own generate on a padded batch, bfloat16. Takes a Hugging Face folder.

It keeps no prefixes between calls and has no constraints: where JSON is asked for it writes what it likes.
"""

import importlib.metadata
import os

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


class Peer:
    """One model."""

    def __init__(self, model):
        self.version = importlib.metadata.version("transformers")
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(model)

    def reset(self):
        pass

    def generate(self, prompts, max_tokens):
        rows = self._run(prompts, max(max_tokens), min_new_tokens=max(max_tokens))
        return [row[:count] for row, count in zip(rows, max_tokens, strict=True)]

    def generate_json(self, prompts, schema, max_tokens):
        rows = self._run(prompts, max_tokens)
        return [self._tokenizer.decode(row, skip_special_tokens=True) for row in rows]

    def _run(self, prompts, count, **options):
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(row)) + row for row in prompts])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in prompts])
        with torch.inference_mode():
            output = self._model.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=count,
                pad_token_id=0,
                **options,
            )
        return output[:, longest:].tolist()
