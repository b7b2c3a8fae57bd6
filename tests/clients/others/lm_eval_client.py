"""lm-eval's local-completions on 20 items; writes (loglikelihood, is greedy) for each as JSON."""

import json
import os
import sys

url, key, name = sys.argv[1:4]
os.environ["OPENAI_API_KEY"] = key
from lm_eval.api.instance import Instance  # noqa: E402 - reads the key when it is imported
from lm_eval.models.openai_completions import LocalCompletionsAPI  # noqa: E402

model = LocalCompletionsAPI(
    model=name,
    base_url=f"{url}/v1/completions",
    tokenizer_backend="remote",
    auth_token=key,
    batch_size=4,
    max_retries=1,
)
items = [tuple(item) for item in json.load(sys.stdin)]
asked = [
    Instance(request_type="loglikelihood", doc={}, arguments=item, idx=index)
    for index, item in enumerate(items)
]
print("RESULT" + json.dumps(model.loglikelihood(asked)))  # noqa: T201
