"""Every option of the runtime, once.

The command line, the RADIXRT_* environment variables and radixrt.toml are generated from these fields: the
option `page_size` is `--page-size`, `RADIXRT_PAGE_SIZE` and `page_size = 16`. Precedence: keyword arguments and
command line, then environment, then file, then default. Environment variables are read here and nowhere else.
"""

from __future__ import annotations

import os
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from radixrt.errors import InvalidRequest, suggest

ENV_PREFIX = "RADIXRT_"
CONFIG_FILE = "radixrt.toml"
DEFAULT_MODEL = "smollm2-135m"


def option(default: Any, text: str, *, low: float | None = None, high: float | None = None) -> Any:
    """Declare an option: its default, its one-line description and, for numbers, its range."""
    return field(default=default, metadata={"help": text, "low": low, "high": high})


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model, where and how it runs."""

    model: str = option(DEFAULT_MODEL, "catalog name, hub id, local folder or .gguf file")
    device: Literal["auto", "cpu", "cuda"] = option("auto", "auto = cuda if there is one, else cpu")
    dtype: Literal["auto", "float32", "bfloat16"] = option(
        "auto", "auto = bfloat16 where the device multiplies it natively, else float32"
    )
    kernels: Literal["auto", "torch", "native"] = option(
        "auto",
        "auto = compiled C++ on a CPU with a compiler, Triton on CUDA, else torch; native = C++ or an error; torch = reference",
    )
    threads: int | None = option(
        None, "CPU threads of the model; default: the physical cores", low=1, high=1024
    )
    max_context: int | None = option(
        None, "longest sequence in tokens; default: the model's own limit", low=2, high=1 << 24
    )


@dataclass(frozen=True, slots=True)
class KVConfig:
    """The paged KV cache and the prefix cache over it."""

    page_size: int = option(16, "token positions per page", low=1, high=1024)
    num_pages: int | None = option(
        None,
        "pages in the pool, page 0 (padding) included; default: from kv_memory_bytes",
        low=2,
        high=1 << 30,
    )
    kv_memory_bytes: int | None = option(
        None,
        "memory for the pages in bytes; default: a quarter of the free memory, at most 4 GiB on a CPU",
        low=1,
    )
    prefix_cache: bool = option(True, "keep computed prefixes for later requests")
    eviction: Literal["lru", "lfu", "fifo", "priority"] = option("lru", "which cached pages go first")


@dataclass(frozen=True, slots=True)
class SchedConfig:
    """How requests share the steps."""

    max_step_tokens: int = option(2048, "most new tokens in one step, all sequences", low=1, high=1 << 20)
    max_running: int = option(64, "most sequences in one step", low=1, high=4096)
    max_waiting: int = option(
        10_000, "most waiting sequences; one more is refused (429)", low=1, high=1 << 20
    )
    policy: Literal["cache_aware", "fcfs", "priority", "random", "dfs", "longest_prefix"] = option(
        "cache_aware",
        "order of the waiting list; cache_aware = oldest first, with a head start for what is cached; the last three are "
        "for comparison, longest_prefix without any bound",
    )
    max_skips: int = option(
        64, "most steps in which later arrivals may pass a waiting request", low=0, high=1 << 20
    )
    ttft_ms: int | None = option(
        None, "target time to first token of latency-class requests: those at risk go first", low=1
    )
    tpot_ms: int | None = option(
        None,
        "target time per output token of latency-class requests: prefill chunks shrink to meet it",
        low=1,
    )
    prefill_mode: Literal["mixed", "separate"] = option(
        "mixed", "prefill and decode in one step, or in alternating steps"
    )
    overlap: Literal["auto", "on", "off"] = option(
        "auto", "plan and launch a step while the one before is on the device; auto = where the device can"
    )
    checks: Literal["idle", "step"] = option(
        "idle", "when the engine audits its invariants: after a second without work, or after every step"
    )
    seed: int | None = option(
        None, "seeds the requests that bring no seed of their own; default: drawn from the system", low=0
    )


@dataclass(frozen=True, slots=True)
class GrammarConfig:
    """Constraints and the limits on them."""

    forced_runs: bool = option(
        True, "append what a constraint forces without sampling it; off: to compare, the answers are the same"
    )
    grammar_cache_bytes: int = option(64 << 20, "memory for compiled constraints (LRU)", low=0)
    max_grammar_bytes: int = option(1 << 20, "largest constraint text in bytes", low=1, high=1 << 26)
    max_grammar_depth: int = option(64, "deepest nesting of a JSON Schema", low=1, high=1024)
    max_grammar_atoms: int = option(
        20_000, "characters of a regular expression once its repeats are written out", low=1, high=1 << 20
    )
    max_grammar_compile_ms: int = option(
        5_000, "CPU milliseconds that reading one constraint may take", low=1, high=600_000
    )
    max_grammar_memory_bytes: int = option(
        1 << 30, "memory in bytes that reading one constraint may take", low=1 << 24, high=1 << 40
    )


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """How `radixrt serve` listens, whom it lets in and what it takes. An engine alone reads none of these."""

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on; 0 = any free one", low=0, high=65535)
    served_model_name: str | None = option(
        None, "name of the model in requests and answers; default: the model option, of a path its last part"
    )
    api_key_file: str | None = option(
        None, "file with one API key per line, as KEY or TENANT=KEY; without any key everyone is let in"
    )
    api_keys: str | None = option(
        None,
        "API keys, comma-separated, as KEY or TENANT=KEY; other users of the machine can see a command line",
    )
    namespaces: Literal["auto", "shared", "per_key", "off"] = option(
        "auto",
        "who shares cached prefixes: everyone, the requests of one key, nobody; auto = per_key with several keys",
    )
    default_max_tokens: int = option(
        2048, "max_tokens of chat requests that say none, cut to the context", low=1, high=1 << 20
    )
    max_requests: int = option(
        1024, "most requests in progress; one more is refused (429)", low=1, high=1 << 20
    )
    max_prompts: int = option(512, "most prompts, or questions, in one request", low=1, high=1 << 16)
    max_body_bytes: int = option(8 << 20, "largest request body in bytes", low=1024, high=1 << 30)
    max_header_bytes: int = option(32 << 10, "largest request headers in bytes", low=1024, high=1 << 20)
    tool_format: Literal["auto", "hermes", "llama3", "mistral"] = option(
        "auto",
        "how tool calls are written; auto = as the model's chat template writes them, hermes if it knows no tools",
    )
    max_request_s: int = option(600, "longest time of a request in seconds", low=1, high=86_400)
    body_timeout_s: int = option(
        30,
        "longest wait for a request's body in seconds; about so long a client may also be silent before it, "
        "or take nothing of its answer",
        low=1,
        high=3600,
    )
    max_retention_s: int = option(
        86_400, "longest time for which a request may ask to keep its prompt cached, in seconds", low=1
    )
    resume_s: int = option(
        60, "how long a resumable stream waits for its reader, and is kept after its end, in seconds", low=1
    )
    resume_bytes: int = option(
        16 << 20, "memory for the kept events of one tenant's resumable streams", low=1024
    )
    drain_s: int = option(
        30, "how long requests may go on after SIGTERM before they get an error, in seconds", low=0, high=3600
    )
    log_format: Literal["json", "text"] = option("json", "form of the log's lines")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All options, by concern."""

    model: ModelConfig = ModelConfig()
    kv: KVConfig = KVConfig()
    sched: SchedConfig = SchedConfig()
    grammar: GrammarConfig = GrammarConfig()
    server: ServerConfig = ServerConfig()

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> EngineConfig:
        """Build from flat option names.

        Raises:
            InvalidRequest: unknown name (suggests the nearest one), wrong type or value out of range.
        """
        known = {spec.name for spec in option_specs()}
        for name in options:
            if name not in known:
                raise InvalidRequest(
                    f"unknown option {name!r}.{suggest(name, known)}", parameter=name, value=options[name]
                )
        sections: dict[str, Any] = {}
        for section, section_type in _sections():
            values = {item.name: options[item.name] for item in fields(section_type) if item.name in options}
            sections[section] = section_type(
                **{name: _checked(name, value) for name, value in values.items()}
            )
        return cls(**sections)

    @classmethod
    def load(
        cls,
        options: Mapping[str, Any],
        *,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> EngineConfig:
        """Merge options with the environment and the file radixrt.toml in `folder`, nearest first."""
        environment = os.environ if environment is None else environment
        merged = {
            **_from_file((folder or Path.cwd()) / CONFIG_FILE),
            **_from_environment(environment),
            **options,
        }
        return cls.from_options(merged)


@dataclass(frozen=True, slots=True)
class OptionSpec:
    """One option as the command line needs it."""

    section: str
    name: str
    type: Any
    default: Any
    help: str
    low: float | None
    high: float | None


def option_specs() -> Iterator[OptionSpec]:
    """Give every option in order. Pure."""
    for section, section_type in _sections():
        hints = typing.get_type_hints(section_type)
        for item in fields(section_type):
            meta = item.metadata
            yield OptionSpec(
                section, item.name, hints[item.name], _default(item), meta["help"], meta["low"], meta["high"]
            )


def environment_help() -> Iterator[tuple[str, str]]:
    """Give the name and description of every environment variable that radixrt reads."""
    yield "RADIXRT_HOME", "folder of model files and what is built from them; default: ~/.cache/radixrt"
    for spec in option_specs():
        yield ENV_PREFIX + spec.name.upper(), spec.help


def home_folder(environment: Mapping[str, str] | None = None) -> Path:
    """Give the folder of model files: $RADIXRT_HOME, else $XDG_CACHE_HOME/radixrt, else ~/.cache/radixrt."""
    environment = os.environ if environment is None else environment
    if home := environment.get("RADIXRT_HOME"):
        return Path(home).expanduser()
    return Path(environment.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "radixrt"


def _sections() -> Iterator[tuple[str, Any]]:
    hints = typing.get_type_hints(EngineConfig)
    for item in fields(EngineConfig):
        yield item.name, hints[item.name]


def _default(item: Field[Any]) -> Any:
    return None if item.default is MISSING else item.default


def _checked(name: str, value: Any) -> Any:
    """Give the value if type and range hold, else raise InvalidRequest."""
    spec = next(spec for spec in option_specs() if spec.name == name)
    allowed = typing.get_args(spec.type) if isinstance(spec.type, types.UnionType) else (spec.type,)
    if value is None and type(None) in allowed:
        return None
    if typing.get_origin(spec.type) is Literal:
        choices = typing.get_args(spec.type)
        if value not in choices:
            near = suggest(str(value), choices)
            raise InvalidRequest(
                f"{name} must be one of {', '.join(choices)}, got {value!r}.{near}",
                parameter=name,
                value=value,
            )
        return value
    kind = next(item for item in allowed if item is not type(None))
    if kind is str and isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise InvalidRequest(
            f"{name} must be of type {kind.__name__}, got {value!r}", parameter=name, value=value
        )
    _check_range(spec, value)
    return value


def _check_range(spec: OptionSpec, value: Any) -> None:
    if (spec.low is not None and value < spec.low) or (spec.high is not None and value > spec.high):
        low = "-inf" if spec.low is None else f"{spec.low:g}"
        high = "inf" if spec.high is None else f"{spec.high:g}"
        raise InvalidRequest(
            f"{spec.name} must be in [{low}, {high}], got {value!r}", parameter=spec.name, value=value
        )


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    known = {ENV_PREFIX + spec.name.upper(): spec for spec in option_specs()}
    found = {}
    for name, text in environment.items():
        if not name.startswith(ENV_PREFIX) or name == "RADIXRT_HOME":
            continue
        if name not in known:
            raise InvalidRequest(
                f"unknown environment variable {name}.{suggest(name, known)}", parameter=name, value=text
            )
        found[known[name].name] = _parse(known[name], name, text)
    return found


def _parse(spec: OptionSpec, name: str, text: str) -> Any:
    allowed = typing.get_args(spec.type) if isinstance(spec.type, types.UnionType) else (spec.type,)
    if bool in allowed:
        words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
        if text.lower() not in words:
            raise InvalidRequest(f"{name} must be true or false, got {text!r}", parameter=name, value=text)
        return words[text.lower()]
    if int in allowed:
        try:
            return int(text)
        except ValueError:
            raise InvalidRequest(
                f"{name} must be a whole number, got {text!r}", parameter=name, value=text
            ) from None
    return text


def _from_file(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path} is not valid TOML: {error}", parameter=CONFIG_FILE) from None
    known = {spec.name for spec in option_specs()}
    for name in values:
        if name not in known:
            raise InvalidRequest(
                f"{path}: unknown option {name!r}.{suggest(name, known)}", parameter=name, value=values[name]
            )
    return values
