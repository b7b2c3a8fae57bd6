"""Run one driver under a peer's own Python: `python drive.py NAME MODEL`. Imports nothing of radixrt.

A driver is a module of the folder beside this file with a class Peer: Peer(model), .version, .reset(),
.generate(prompts, counts) -> ids, .generate_json(prompts, schema, max_tokens) -> texts.
"""

import importlib
import json
import sys
import time

READY = "radixrt-peer "


def tell(answer):
    """Give one answer; the mark tells it from what libraries write."""
    sys.stdout.write(READY + json.dumps(answer) + "\n")
    sys.stdout.flush()


def main(name, model):
    """Answer requests until the input ends."""
    started = time.perf_counter()
    peer = importlib.import_module(f"drivers.{name}").Peer(model)
    peer.generate([[5] * 32], [4])  # what is done once is not measured
    tell({"version": peer.version, "startup_s": time.perf_counter() - started})
    for line in sys.stdin:
        request = json.loads(line)
        operation = request.pop("op")
        began = time.perf_counter()
        if operation == "reset":
            peer.reset()
            tell({})
        elif operation == "json":
            texts = peer.generate_json(**request)
            tell({"texts": texts, "seconds": time.perf_counter() - began})
        else:
            outputs = peer.generate(**request)
            tell({"outputs": outputs, "seconds": time.perf_counter() - began})


if __name__ == "__main__":
    main(*sys.argv[1:])
