"""OpenVINO GenAI's continuous batching, bfloat16, prefix caching on. Takes a folder that optimum-intel exported."""

import importlib.metadata
import json
import os

import numpy as np
import openvino
import openvino_genai


class Peer:
    """One pipeline; prompts of a call run as one batch. It has no way to forget prefixes but to begin anew."""

    def __init__(self, model):
        self.version = importlib.metadata.version("openvino-genai")
        self._folder = model
        self._pipeline = self._open()

    def _open(self):
        scheduling = openvino_genai.SchedulerConfig()
        scheduling.cache_size = 2
        scheduling.max_num_batched_tokens = 2048
        scheduling.max_num_seqs = 64
        scheduling.dynamic_split_fuse = True
        scheduling.enable_prefix_caching = True
        properties = {
            "INFERENCE_NUM_THREADS": int(os.environ["OMP_NUM_THREADS"]),
            "INFERENCE_PRECISION_HINT": "bf16",
        }
        return openvino_genai.ContinuousBatchingPipeline(self._folder, scheduling, "CPU", properties)

    def reset(self):
        self._pipeline = None  # first: two caches at once would not fit everywhere
        self._pipeline = self._open()
        self.generate([[5] * 32], [2])

    def generate(self, prompts, max_tokens):
        settings = [self._settings(count) for count in max_tokens]
        for item in settings:
            item.ignore_eos = True
        return [list(ids) for ids in self._run(prompts, settings)]

    def generate_json(self, prompts, schema, max_tokens):
        settings = [self._settings(max_tokens) for _ in prompts]
        for item in settings:
            item.structured_output_config = openvino_genai.StructuredOutputConfig(
                json_schema=json.dumps(schema)
            )
        tokenizer = self._pipeline.get_tokenizer()
        return [tokenizer.decode(list(ids)) for ids in self._run(prompts, settings)]

    def _settings(self, count):
        settings = openvino_genai.GenerationConfig()
        settings.max_new_tokens = count
        settings.do_sample = False
        settings.apply_chat_template = False
        return settings

    def _run(self, prompts, settings):
        inputs = [openvino.Tensor(np.array([ids], dtype=np.int64)) for ids in prompts]
        return [result.m_generation_ids[0] for result in self._pipeline.generate(inputs, settings)]
