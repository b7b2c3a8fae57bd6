"""Fields of other servers and of older APIs that look as if they did something here; each says what to use."""

from __future__ import annotations

_USE_STRUCTURED = "retired; use structured_outputs or response_format"

RETIRED_FIELDS: dict[str, str] = {
    "guided_json": f"{_USE_STRUCTURED}, e.g. structured_outputs: {{json: ...}}",
    "guided_regex": f"{_USE_STRUCTURED}, e.g. structured_outputs: {{regex: ...}}",
    "guided_choice": f"{_USE_STRUCTURED}, e.g. structured_outputs: {{choice: [...]}}",
    "guided_grammar": f"{_USE_STRUCTURED}, e.g. structured_outputs: {{grammar: ...}}",
    "guided_decoding_backend": "retired; the engine of a constraint is chosen here",
    "guided_whitespace_pattern": "retired; use structured_outputs: {disable_any_whitespace: ...}",
    "structural_tag": "use response_format: {type: structural_tag, ...}",
    "grammar": "not a field here; use structured_outputs: {grammar: ...} or ebnf",
    "json_schema": "not a field here; use response_format: {type: json_schema, ...}",
    "schema": "not a field here; use response_format: {type: json_schema, ...}",
    "format": "not a field here; use response_format",
    "choices": "not a field here; use structured_outputs: {choice: [...]}",
    "choice": "not a field here; use structured_outputs: {choice: [...]}",
    "functions": "retired; use tools",
    "function_call": "retired; use tool_choice",
    "chat_template": "templates come from the model or the server's operator, never from a request",
    "trust_remote_code": "there is no such thing here: no code of a model's repository is run",
    "use_beam_search": "not supported",
    "length_penalty": "not supported (there is no beam search)",
    "best_of": "not supported; use n",
}
