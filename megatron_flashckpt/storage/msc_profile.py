"""Profiles of NVIDIA's Multi-Storage Client, whose files say where `msc://PROFILE/...` is.

The client is not imported. Its names of files and settings are those of release 1.3.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from megatron_flashckpt.errors import ConfigError

#: Beginning of the paths of the client.
MSC = "msc://"
#: Settings of a profile that change neither names nor contents of its objects. The cache is the
#: client's own.
_PLAIN = {"storage_provider", "credentials_provider", "caching_enabled", "comment"}
#: Options of a provider that say how to reach it, and are not known here.
_UNKNOWN_OPTIONS = {"profile_name", "verify", "signature_version"}
_SCHEMES = {"s3": "s3", "s8k": "s3", "gcs": "gs", "azure": "az"}
#: In values: names of environment variables.
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
#: Beginnings of the variables that agents get, too.
_PASSED_ON = ("AWS_", "GOOGLE_", "AZURE_", "MSC_")


class Bucket(NamedTuple):
    """The bucket that a URL stands for, in the words of obstore."""

    url: str
    config: Mapping[str, str] = {}
    allows_http: bool = False
    """True: requests may go without TLS."""


class _UnknownError(Exception):
    """A profile has something that only the client itself understands."""


def bucket_of(root: str) -> Bucket:
    """Return the bucket behind `msc://PROFILE/PREFIX`.

    Raises:
        ConfigError: there is no such profile, or only the client itself knows what it means.
    """
    name, _, prefix = root.removeprefix(MSC).partition("/")
    place, profile = _profile(root, name)
    try:
        return _bucket(profile, prefix)
    except _UnknownError as error:
        raise ConfigError(
            f"{root}: the profile in {place} has {error}; correct it, or give the URL of its "
            "bucket, with endpoint and credentials as variables"
        ) from error


def _bucket(profile: Mapping[str, Any], prefix: str) -> Bucket:
    _refuse(profile.keys() - _PLAIN)
    provider, options = _extension(profile.get("storage_provider"))
    scheme = _SCHEMES.get(provider)
    if scheme is None:
        raise _UnknownError(f"the type '{provider}', not one of {', '.join(_SCHEMES)}")
    _refuse(options.keys() & _UNKNOWN_OPTIONS)
    base, endpoint, region = (
        _expanded(options.get(key, "")) for key in ("base_path", "endpoint_url", "region_name")
    )
    base = base.strip("/")
    if not base:
        raise _UnknownError("no base_path")
    config = {}
    if endpoint:
        _refuse({"endpoint_url"} if scheme == "gs" else ())
        config["endpoint"] = endpoint
    if scheme == "s3" and region:
        config["region"] = region
    if scheme == "az" and (account := urlsplit(endpoint).hostname):
        config["account_name"] = account.partition(".")[0]
    config.update(_credentials(scheme, profile.get("credentials_provider")))
    url = f"{scheme}://{base}/{prefix}".rstrip("/")
    return Bucket(url, config, allows_http=config.get("endpoint", "").startswith("http://"))


def _refuse(names: Iterable[str]) -> None:
    if listed := ", ".join(f"'{name}'" for name in sorted(names)):
        raise _UnknownError(f"{listed}, which only the client understands")


def _profile(root: str, name: str) -> tuple[str, Mapping[str, Any]]:
    """Return the first file of the client's settings that exists, and a profile in it."""
    path = next((path for path in _paths(os.environ) if path.exists()), None)
    if path is None:
        raise ConfigError(
            f"{root}: no file of the Multi-Storage Client has profiles; set MSC_CONFIG to the file"
        )
    try:
        text = path.read_text()
        decoded = json.loads(text) if path.suffix == ".json" else msgspec.yaml.decode(text)
        profile = decoded["profiles"][name]
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error}); correct the file") from error
    except (ValueError, msgspec.MsgspecError):
        # Without the error, which quotes lines of the file: they may hold a secret.
        raise ConfigError(f"{path}: is neither JSON nor YAML; correct the file") from None
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"{root}: {path} has no profile '{name}'; add it, or correct the name"
        ) from error
    if not isinstance(profile, dict):
        raise ConfigError(f"{path}: profile '{name}' is no mapping; correct the file")
    return str(path), profile


def _paths(environ: Mapping[str, str]) -> Iterator[Path]:
    """Yield the files in which the client looks for profiles; the first one counts."""
    if path := environ.get("MSC_CONFIG"):
        yield Path(path)
    files: list[Path] = []
    if config_home := environ.get("XDG_CONFIG_HOME"):
        files.append(Path(config_home, "msc", "config"))
    if home := environ.get("HOME"):
        files += [Path(home, ".msc_config"), Path(home, ".config", "msc", "config")]
    for directory in (environ.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(":"):
        files.append(Path(directory, "msc", "config"))
    files.append(Path("/etc/msc_config"))
    for file in files:
        yield from (Path(f"{file}.yaml"), Path(f"{file}.json"))


def _extension(value: Any) -> tuple[str, dict[str, Any]]:
    """Return type and options of a part of a profile."""
    value = value if isinstance(value, dict) else {}
    options = value.get("options")
    return str(value.get("type")), options if isinstance(options, dict) else {}


def _credentials(scheme: str, value: Any) -> dict[str, str]:
    if value is None:
        return {}
    kind, options = _extension(value)
    values = {key: _expanded(value) for key, value in options.items()}
    if scheme == "s3" and kind == "S3Credentials":
        names = {
            "access_key": "access_key_id",
            "secret_key": "secret_access_key",
            "session_token": "session_token",
        }
        return {names[key]: text for key, text in values.items() if key in names}
    if scheme == "az" and kind == "AzureCredentials":
        parts = dict(part.partition("=")[::2] for part in values.get("connection", "").split(";"))
        names = {
            "AccountName": "account_name",
            "AccountKey": "account_key",
            "BlobEndpoint": "endpoint",
        }
        return {names[key]: text for key, text in parts.items() if key in names}
    raise _UnknownError(f"credentials of type '{kind}', which only the client understands")


def _expanded(value: Any) -> str:
    """Return a value with the environment variables in it."""

    def replaced(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if not name.startswith(_PASSED_ON):
            raise _UnknownError(
                f"the variable {name}, but agents get only those that begin with "
                f"{', '.join(_PASSED_ON)}"
            )
        if name not in os.environ:
            raise _UnknownError(f"the variable {name}, which is not set")
        return os.environ[name]

    return _VARIABLE.sub(replaced, str(value))
