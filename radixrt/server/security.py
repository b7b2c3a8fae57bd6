"""Who may come in: API keys, tenants and the namespaces that follow from them."""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from radixrt.config import ServerConfig
from radixrt.errors import InvalidRequest
from radixrt.types import Namespace

PUBLIC_PATHS = frozenset({"/health"})
MIN_KEY_CHARACTERS = 8
MAX_KEY_CHARACTERS = 512


@dataclass(frozen=True, slots=True)
class Tenant:
    """One owner of an API key, or everyone where no keys are set. The name is the operator's, never the client's."""

    name: str


EVERYONE = Tenant("")


class KeyRing:
    """The API keys as digests. Immutable.

    Comparing digests of equal length with hmac.compare_digest, all of them each time, tells nothing by its time.
    """

    def __init__(self, keys: Mapping[str, str]) -> None:
        """Take tenant names by key.

        Raises:
            InvalidRequest: a key is too short or too long.
        """
        self._tenants: list[tuple[bytes, Tenant]] = []
        for key, name in keys.items():
            if not MIN_KEY_CHARACTERS <= len(key) <= MAX_KEY_CHARACTERS:
                raise InvalidRequest(
                    f"an API key must have {MIN_KEY_CHARACTERS} to {MAX_KEY_CHARACTERS} characters, "
                    f"one has {len(key)}",
                    parameter="api_keys",
                )
            self._tenants.append((_digest(key), Tenant(name)))

    @classmethod
    def load(cls, config: ServerConfig) -> KeyRing:
        """Read the keys of the options and of the key file.

        Raises:
            InvalidRequest: a file that cannot be read or holds no key, or a bad key.
        """
        entries = (config.api_keys or "").split(",")
        if config.api_key_file is not None:
            try:
                lines = Path(config.api_key_file).expanduser().read_text(encoding="utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise InvalidRequest(
                    f"api_key_file cannot be read: {error}", parameter="api_key_file"
                ) from None
            entries += [line for line in lines if not line.lstrip().startswith("#")]
        ring = cls(_parsed(entries))
        if not ring and (config.api_key_file is not None or config.api_keys is not None):
            raise InvalidRequest("the API keys asked for are not there", parameter="api_keys")
        return ring

    def __len__(self) -> int:
        return len(self._tenants)

    def tenant(self, authorization: str | None) -> Tenant | None:
        """Give whose key an Authorization header holds; None for nobody's. Without keys, everyone is let in."""
        if not self._tenants:
            return EVERYONE
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer":
            return None
        digest, found = _digest(key.strip()), None
        for known, tenant in self._tenants:
            if hmac.compare_digest(known, digest):
                found = tenant
        return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _parsed(entries: Iterable[str]) -> dict[str, str]:
    """Give tenant names by key; a key without a name is a tenant of its own, named by its digest."""
    keys: dict[str, str] = {}
    for entry in entries:
        if not (text := entry.strip()):
            continue
        name, equals, key = text.partition("=")
        if not equals:
            name, key = f"key-{hashlib.sha256(text.encode()).hexdigest()[:8]}", text
        if not name or not name.isprintable():
            raise InvalidRequest("a tenant's name must be printable text", parameter="api_keys")
        if keys.setdefault(key, name) != name:
            raise InvalidRequest(
                f"the tenants {keys[key]!r} and {name!r} have the same API key", parameter="api_keys"
            )
    return keys


@dataclass(frozen=True, slots=True)
class NamespaceRule:
    """How a request's namespace follows from its tenant; a client can only divide its own further."""

    mode: str  # "shared", "per_key" or "off"

    @classmethod
    def of(cls, config: ServerConfig, *, num_keys: int) -> NamespaceRule:
        """Choose the mode that `auto` left open."""
        if config.namespaces != "auto":
            return cls(config.namespaces)
        return cls("per_key" if num_keys > 1 else "shared")

    def namespace(self, tenant: Tenant, *, label: str | None, is_private: bool = False) -> Namespace:
        """Give the namespace of a request.

        Args:
            label: the client's prompt_cache_key: requests with different ones share nothing.
            is_private: share nothing with any other request.
        """
        if self.mode == "off" or is_private:
            return Namespace(salt=f"request:{secrets.token_hex(16)}")
        owner = tenant.name if self.mode == "per_key" else ""
        if not owner and label is None:
            return Namespace()
        return Namespace(salt=json.dumps([owner, label]))  # JSON: no owner and label can look like others
