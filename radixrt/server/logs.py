"""Logs: one line per event, as JSON or as text; never a prompt, an answer or a key."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any


class JsonFormatter(logging.Formatter):
    """One JSON object per record; `extra={"fields": {...}}` adds to it."""

    def format(self, record: logging.LogRecord) -> str:
        """Give the line."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=True, default=str)


class TextFormatter(logging.Formatter):
    """A line to read: time, level, logger, message and fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Give the line."""
        fields = " ".join(f"{name}={value!r}" for name, value in _fields(record).items())
        time = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        text = f"{time} {record.levelname:7} {record.name}: {record.getMessage()} {fields}".rstrip()
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields = vars(record).get("fields", {})
    return dict(fields) if isinstance(fields, dict) else {}


def set_up_logs(form: str) -> None:
    """Send radixrt's and uvicorn's logs to stderr in one form."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    for name, level in (("radixrt", logging.INFO), ("uvicorn", logging.WARNING)):
        logging.getLogger(name).setLevel(level)
