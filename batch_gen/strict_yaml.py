"""YAML as the safe loader reads it, but a key that stands twice in a mapping is an error, not a silent loss."""

from __future__ import annotations

from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """As the safe loader, with a look at the keys first."""
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue  # the safe loader refuses what cannot be a key
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} stands there twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


def load(text: str) -> Any:
    """The document in `text`; raises yaml.YAMLError."""
    return yaml.load(text, _Loader)  # noqa: S506 - a safe loader
