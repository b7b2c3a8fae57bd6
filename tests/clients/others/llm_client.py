"""llm on its command line: text, and a schema, streamed."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

url, key, name = sys.argv[1:]
with tempfile.TemporaryDirectory() as folder:
    model = {
        "model_id": "mine",
        "model_name": name,
        "api_base": f"{url}/v1",
        "supports_schema": True,
        "api_key_name": "mine",
    }
    Path(folder, "extra-openai-models.yaml").write_text(json.dumps([model]))
    environment = {**os.environ, "LLM_USER_PATH": folder, "OPENAI_API_KEY": key}

    def run(*arguments: str) -> str:
        command = [
            sys.executable,
            "-m",
            "llm",
            "-m",
            "mine",
            "--key",
            key,
            "-o",
            "max_tokens",
            "60",
            *arguments,
        ]
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout

    assert run("Name a colour.").strip()
    schema = json.dumps({"type": "object", "properties": {"age": {"enum": [7, 41]}}, "required": ["age"]})
    assert json.loads(run("Bob is 41.", "--schema", schema))["age"] in (7, 41)
    assert json.loads(run("Bob is 41.", "--schema", schema, "--no-stream"))["age"] in (7, 41)
