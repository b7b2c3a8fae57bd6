"""vLLM on a CPU: compiled, prefix caching on, bfloat16. Takes a Hugging Face folder."""

import importlib.metadata
import os

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams


class Peer:
    """One LLM; prompts of a call run as one batch."""

    def __init__(self, model):
        self.version = importlib.metadata.version("vllm-cpu")
        self._llm = LLM(
            model,
            dtype="bfloat16",
            enable_prefix_caching=True,
            max_model_len=4096,
            max_num_seqs=64,
            disable_log_stats=True,
        )

    def reset(self):
        self._llm.reset_prefix_cache()

    def generate(self, prompts, max_tokens):
        sampling = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in max_tokens]
        return [list(output.token_ids) for output in self._run(prompts, sampling)]

    def generate_json(self, prompts, schema, max_tokens):
        constraint = StructuredOutputsParams(json=schema)
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, structured_outputs=constraint)
        return [output.text for output in self._run(prompts, sampling)]

    def _run(self, prompts, sampling):
        requests = [{"prompt_token_ids": ids} for ids in prompts]
        return [output.outputs[0] for output in self._llm.generate(requests, sampling, use_tqdm=False)]
