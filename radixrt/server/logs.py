"""Logs: one line per event, as JSON or as text; never a prompt, an answer or a key."""

from __future__ import annotations

import json
import logging
import queue
import sys
import threading
from datetime import UTC, datetime
from typing import Any, TextIO

MAX_WAITING_LINES = 10_000


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


class LogWriter(logging.Handler):
    """Put records into lines and write them, in a thread of its own: a stream that takes nothing must not hold up requests.

    Invariant: about MAX_WAITING_LINES wait at most; what comes when it is full is dropped and counted.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self.num_dropped = 0
        self._stream = stream
        self._waiting: queue.SimpleQueue[logging.LogRecord | str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="radixrt-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Take a record; never waits.

        Arguments may change until the thread comes to them, and a traceback holds all that its frames hold: such
        records, which are rare, are put into words at once.
        """
        if self._waiting.qsize() >= MAX_WAITING_LINES:
            self.num_dropped += 1
            return
        try:
            self._waiting.put(self.format(record) if record.args or record.exc_info else record)
        except Exception:  # noqa: BLE001 - what cannot be said is no fault of the request that says it
            self.handleError(record)

    def finish(self, *, timeout_s: float = 1.0) -> None:
        """Write what waits, as far as the stream takes it within the time."""
        self._waiting.put(None)
        self._thread.join(timeout_s)

    def _write(self) -> None:
        while (item := self._waiting.get()) is not None:
            try:
                self._stream.write((item if isinstance(item, str) else self.format(item)) + "\n")
                if self._waiting.empty():
                    self._stream.flush()
            except Exception:  # noqa: BLE001 - a full disk, a line that cannot be said: the next one may go through
                self.handleError(_named(item))
        self._stream.flush()


def _named(item: logging.LogRecord | str) -> logging.LogRecord:
    return item if isinstance(item, logging.LogRecord) else logging.makeLogRecord({"msg": item})


def set_up_logs(form: str) -> LogWriter:
    """Send radixrt's and uvicorn's logs to stderr in one form."""
    handler = LogWriter(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    for name, level in (("radixrt", logging.INFO), ("uvicorn", logging.WARNING)):
        logging.getLogger(name).setLevel(level)
    return handler
