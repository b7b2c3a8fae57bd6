"""Tokenizers whose chat templates write tool calls as the known families of models do."""

from __future__ import annotations

import tokenizers

from radixrt.text.tokenizer import Tokenizer
from tests.support.tokenizers import JSON_MERGES, byte_tokenizer

_OPEN = "{% for m in messages %}"
_TEXT = "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
_END = "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"

HERMES = (
    "{% if tools %}{{ '<|im_start|>system\nTools:' }}{% for t in tools %}{{ '\n' }}{{ t | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}"
    + _OPEN
    + "{% if m.role == 'assistant' and m.tool_calls %}{{ '<|im_start|>assistant\n' + m.content }}"
    "{% for c in m.tool_calls %}{% if not loop.first or m.content %}{{ '\n' }}{% endif %}"
    '{{ \'<tool_call>\n{"name": "\' + c.function.name + \'", "arguments": \' }}'
    "{{ c.function.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% elif m.role == 'tool' %}{{ '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}"
    "{% else %}" + _TEXT + "{% endif %}" + _END
)
LLAMA3 = (
    _OPEN + "{% if m.role == 'assistant' and m.tool_calls %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    "{% set c = m.tool_calls[0].function %}"
    "{{ '<|im_start|>assistant\n{\"name\": \"' + c.name + '\", \"parameters\": ' }}{{ c.arguments | tojson }}{{ '}<|im_end|>\n' }}"
    "{% elif m.role == 'tool' %}{{ '<|im_start|>ipython\n' }}{{ m.content | tojson }}{{ '<|im_end|>\n' }}"
    "{% elif loop.first and tools %}{{ '<|im_start|>user\n' }}{% for t in tools %}{{ t | tojson(indent=4) }}{{ '\n\n' }}{% endfor %}"
    "{{ m.content + '<|im_end|>\n' }}"
    "{% else %}" + _TEXT + "{% endif %}" + _END
)
MISTRAL = (
    "{% if tools %}{{ '[AVAILABLE_TOOLS] [' }}{% for t in tools %}{% for k, v in t.function.items() %}"
    "{{ k + ': ' }}{% if v is string %}{{ v }}{% else %}{{ v | tojson }}{% endif %}{% endfor %}{% endfor %}{{ '][/AVAILABLE_TOOLS]' }}{% endif %}"
    + _OPEN
    + "{% if m.role == 'assistant' and m.tool_calls %}{{ '[TOOL_CALLS] [' }}{% for c in m.tool_calls %}"
    "{% if c.id | length != 9 %}{{ raise_exception('ids have length 9') }}{% endif %}"
    '{{ \'{"name": "\' + c.function.name + \'", "arguments": \' }}{{ c.function.arguments | tojson }}{{ \', "id": "\' + c.id + \'"}\' }}'
    "{% if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}{{ ']<|im_end|>' }}"
    "{% elif m.role == 'tool' %}{{ '[TOOL_RESULTS] {\"content\": ' }}{{ m.content | tojson }}{{ ', \"call_id\": \"' + m.tool_call_id + '\"}[/TOOL_RESULTS]' }}"
    "{% else %}" + _TEXT + "{% endif %}" + _END
)
MISTRAL_ARGS = (
    "{% if tools %}{{ '[AVAILABLE_TOOLS]' }}{{ tools | tojson }}{{ '[/AVAILABLE_TOOLS]' }}{% endif %}"
    + _OPEN
    + "{% if m.role == 'assistant' and m.tool_calls %}{{ m.content }}{% for c in m.tool_calls %}"
    "{{ '[TOOL_CALLS]' + c.function.name + '[ARGS]' }}{{ c.function.arguments | tojson }}{% endfor %}{{ '<|im_end|>' }}"
    "{% elif m.role == 'tool' %}{{ '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}"
    "{% else %}" + _TEXT + "{% endif %}" + _END
)
UNKNOWN = (
    _OPEN
    + "{% for c in m.tool_calls or [] %}{{ '<function=' + c.function.name + '>' }}{{ c.function.arguments | tojson }}{% endfor %}"
    + _TEXT
    + _END
)
TEMPLATES = {"hermes": HERMES, "llama3": LLAMA3, "mistral": MISTRAL, "mistral_args": MISTRAL_ARGS}
CONTROLS = (
    "[TOOL_CALLS]",
    "[ARGS]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
)


def tool_tokenizer(template: str) -> Tokenizer:
    """Give a byte tokenizer with Mistral's control tokens and a template."""
    plain = byte_tokenizer(extra=(*JSON_MERGES, "<tool_call>", "</tool_call>", '"arguments'))
    backend = tokenizers.Tokenizer.from_str(plain.serialized())
    backend.add_special_tokens(list(CONTROLS))
    return Tokenizer(
        backend,
        special_tokens=dict(plain.special_tokens),
        eos_ids=plain.eos_ids,
        chat_template=template,
    )
