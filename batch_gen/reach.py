"""How flags or a job file want stores to be reached: the `s3-` settings, the same for every command."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from batch_gen.flags import FLAGS
from batch_gen.storage.address import check_endpoint
from batch_gen.storage.base import StoreOptions

REACH: Final = tuple(flag.key for flag in FLAGS if flag.name.startswith("s3-"))


def reach(layers: Mapping[str, Any]) -> StoreOptions:
    """The options of a store from settings by key; those that nobody set may be missing.

    Raises:
        UsageError: the endpoint is no plain URL of a server.
    """
    if layers.get("s3_endpoint") is not None:
        check_endpoint("--s3-endpoint", str(layers["s3_endpoint"]))
    return StoreOptions(
        endpoint_url=layers.get("s3_endpoint"),
        checksum=layers.get("s3_checksum") or "when_supported",
        kms_key=layers.get("s3_kms_key"),
        storage_class=layers.get("s3_storage_class"),
        tags=layers.get("s3_tags"),
        bucket_owner=layers.get("s3_bucket_owner"),
        requester_pays=bool(layers.get("s3_requester_pays")),
    )
