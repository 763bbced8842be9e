"""Addresses of stores and services as users give them: checked in one place, and never a place for a secret.

An address is written into run.json, into job names and tags and into the commands of workers, where everybody who may
look at a run reads it. So a user name, a password or a signed query is refused, and no message repeats it.
"""

from __future__ import annotations

import re
from typing import Final

from batch_gen.errors import UsageError

_BUCKET: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
_HOST: Final = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")
_CREDENTIALS: Final = "credentials come from the environment, an AWS profile or a role"


def check_address(what: str, text: str) -> None:
    """Check the form of `scheme://...`; a path of this machine passes unread.

    Args:
        what: the flag or thing that was given, the first words of a message.
        text: the address.

    Raises:
        UsageError: it holds a user, a password, a query or a fragment, or names no bucket.
    """
    scheme, found, rest = text.partition("://")
    if not found:
        return
    authority, _, _ = rest.partition("/")
    if "@" in authority or (":" in authority and scheme == "s3"):
        raise UsageError(f"{what}: a user name or password in an address would be written into the run; {_CREDENTIALS}")
    if "?" in rest or "#" in rest:
        raise UsageError(
            f"{what}: a query or fragment (?..., #...) is no part of a store's address, and a signed one is a secret;"
            f" leave it out: {_CREDENTIALS}"
        )
    if scheme == "s3" and not _BUCKET.fullmatch(authority):
        raise UsageError(f"{what}: s3://{authority} names no bucket; use s3://bucket/prefix")


def check_endpoint(what: str, text: str) -> None:
    """Check the URL of a service.

    Raises:
        UsageError: it is no plain http:// or https:// URL, or holds a user, a password, a query or a fragment.
    """
    check_address(what, text)
    scheme, found, rest = text.partition("://")
    if not found or scheme not in ("http", "https") or not _HOST.fullmatch(rest.partition("/")[0]):
        raise UsageError(f"{what}: expected http://host:port or https://host")
