"""URLs as the places of runs and files. fsspec transports the bytes; this module alone knows its filesystems.

Credentials come from the environment, as the drivers of fsspec find them. A URL that holds a password is refused, the
query of a URL is never shown, and errors of drivers are quoted without secrets.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensortap.errors import (
    MissingDependency,
    RunUnreadable,
    StoreWriteError,
    TensortapError,
    UsageError,
    scrub,
    shorten,
)

__all__ = [
    "Place",
    "Url",
    "address_of",
    "as_place",
    "driver_reason",
    "filesystem",
    "is_url",
    "read_error",
    "upload_error",
]

_URL = re.compile(r"(?P<protocol>[A-Za-z][A-Za-z0-9+.\-]+)(::[A-Za-z0-9+.\-]+)*://")
"""A protocol of one letter would be a drive of Windows."""
_COLLAPSED = re.compile(r"(s3|s3a|gs|gcs|az|abfs|abfss|hf|memory|https?):/[^/]")
_LOCAL = ("file", "local")
_EXTRAS = {
    "s3": ("s3", "s3fs"),
    "s3a": ("s3", "s3fs"),
    "gs": ("gcs", "gcsfs"),
    "gcs": ("gcs", "gcsfs"),
    "az": ("azure", "adlfs"),
    "abfs": ("azure", "adlfs"),
    "abfss": ("azure", "adlfs"),
    "hf": ("hf", "huggingface_hub"),
}
"""The extra of this package that installs the driver of a protocol, and the driver."""
_NAMED_SECRET = re.compile(
    r"(?i)([\w\-]*(?:secret|signature|token|passw(?:or)?d|credential|authorization|account_?key|access_?key)[\w\-]*"
    r"[\"']?\s*[=:]\s*)(?:bearer\s+|basic\s+)?[\"']?[^\s\"',;&<>]+"
)
_LONGEST_REASON = 300


@dataclass(frozen=True)
class Url:
    """A place in an object store. `address` is the URL; its text shows no secrets."""

    address: str

    @property
    def protocol(self) -> str:
        return self.address.partition("://")[0].rpartition("::")[2].lower()

    @property
    def name(self) -> str:
        return self.address.partition("?")[0].rstrip("/").rpartition("/")[2]

    @property
    def suffix(self) -> str:
        return Path(self.name).suffix

    def with_name(self, name: str) -> Url:
        return Url(f"{self.address.rpartition('/')[0]}/{name}")

    def __truediv__(self, name: str) -> Url:
        return Url(f"{self.address.rstrip('/')}/{name}")

    def __str__(self) -> str:
        return scrub(self.address)

    def __repr__(self) -> str:
        return f"Url({str(self)!r})"


Place = Path | Url
"""The place of a run or a file."""


def is_url(text: object) -> bool:
    """Return whether a text is a URL, also one of a local file."""
    return isinstance(text, str) and _URL.match(text) is not None


def as_place(path: str | os.PathLike[str] | Url) -> Place:
    """Return a path, or the place that a URL names. Raise UsageError for a URL that cannot be one."""
    if isinstance(path, Url):
        return path
    text = os.fspath(path)
    match = _URL.match(text)
    if match is None:
        if _COLLAPSED.match(text) and not Path(text).exists():
            raise UsageError(f"{text}: a URL as a Path has lost a slash; pass it as text")
        return Path(text)
    if match["protocol"].lower() in _LOCAL:
        return Path(text[match.end() :])
    return _checked(text, match.end())


def address_of(place: Place) -> str:
    """Return the text under which `store.source.AddressedFiles` finds a place."""
    return place.address if isinstance(place, Url) else str(place)


def filesystem(url: Url) -> tuple[Any, str]:
    """Return the filesystem of fsspec, and the path of a URL in it. Listings are never cached: runs grow."""
    import fsspec

    try:
        return fsspec.core.url_to_fs(url.address, use_listings_cache=False)  # type: ignore[no-any-return]
    except TensortapError:
        raise
    except ImportError as error:
        extra, driver = _EXTRAS.get(url.protocol, ("", ""))
        hint = f'{driver}: pip install "tensortap[{extra}]"' if extra else driver_reason(error)
        raise MissingDependency(f"{url.protocol}:// needs {hint}") from None
    except ValueError as error:
        if "rotocol not known" in str(error):
            raise UsageError(
                f"{url}: {url.protocol}:// is not a protocol that fsspec knows; use s3, gs, az, hf or a path"
            ) from None
        raise UsageError(f"{url} is not a usable URL: {driver_reason(error)}") from None
    except Exception as error:
        raise RunUnreadable(f"{url} cannot be opened: {driver_reason(error)}.") from None


def driver_reason(error: BaseException) -> str:
    """Return why a driver failed, as one short line without secrets and without a full stop."""
    name, text = type(error).__name__, " ".join(str(error).split())
    if name == "NoCredentialsError" or "nable to locate credentials" in text:
        return "there are no credentials in the environment"
    if isinstance(error, PermissionError):
        return f"permission denied ({_clean(text)})" if text else "permission denied"
    if "Connection" in name or "Timeout" in name or isinstance(error, (ConnectionError, TimeoutError)):
        return f"the server cannot be reached ({name}: {_clean(text)})" if text else "the server cannot be reached"
    if isinstance(error, FileNotFoundError):
        return "the bucket does not exist" if "bucket" in text.lower() else "it does not exist"
    return f"{name}: {_clean(text)}" if text else name


def read_error(error: BaseException, place: object) -> RunUnreadable:
    """Return the error for an object that cannot be read."""
    return RunUnreadable(f"{place} cannot be read: {driver_reason(error)}.{_advice(error)}")


def upload_error(error: BaseException, place: object) -> StoreWriteError:
    """Return the error for an object that cannot be written."""
    return StoreWriteError(f"{place} could not be written: {driver_reason(error)}.{_advice(error)}")


def _advice(error: BaseException) -> str:
    if isinstance(error, PermissionError):
        return " Check the credentials in the environment, and what they allow."
    if type(error).__name__ == "NoCredentialsError":
        return " Set the variables that the driver reads, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."
    return ""


def _checked(text: str, start: int) -> Url:
    rest = text[start:]
    if scrub(text).partition("://")[2].startswith("***@"):
        raise UsageError(
            f"{text}: the URL holds a password. Credentials come from the environment, such as AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY: set them there, and remove them from the URL"
        )
    if any(ord(char) < 32 or ord(char) == 127 for char in rest):
        raise UsageError(f"{text!r}: a URL cannot hold control characters")
    if not rest.strip("/"):
        raise UsageError(f"{text}: the URL names no bucket and no path")
    if ".." in rest.partition("?")[0].split("/"):
        raise UsageError(f"{text}: a URL cannot hold the part ..; name the folder itself")
    return Url(text.rstrip("/"))


def _clean(text: str) -> str:
    return shorten(_NAMED_SECRET.sub(r"\1***", scrub(text)), _LONGEST_REASON).rstrip(".")
