"""The HTTP server: an engine behind the OpenAI API's routes and a native one.

bytes -> gate (id, key, limits) -> route -> body -> prompt ids, SamplingParams -> engine -> answer or events
"""

from __future__ import annotations

from radixrt.server.app import create_app

__all__ = ["create_app"]
