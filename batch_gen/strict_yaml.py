"""YAML as the safe loader reads it, but a key that stands twice in a mapping is an error, not a silent loss.

Whatever is wrong with a document is a `yaml.YAMLError`; PyYAML itself lets a date without such a day, a number that is
none or a thousand open brackets out as errors of Python.
"""

from __future__ import annotations

from typing import Any, Final

import yaml

_SHOWN: Final = 60  # characters of a wrong value in a message
_OF_PYTHON: Final = (ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError)


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

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """As the safe loader; a value that is not of its type is told with its place."""
        try:
            return super().construct_object(node, deep=deep)
        except _OF_PYTHON as error:
            text = f"{node.value!r}" if isinstance(node, yaml.ScalarNode) else "this"
            text = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
            problem = f"{text} is no {str(node.tag).rpartition(':')[2]} ({type(error).__name__}: {error})"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from error


def load(text: str) -> Any:
    """The document in `text`; raises yaml.YAMLError."""
    try:
        return yaml.load(text, _Loader)  # noqa: S506 - a safe loader
    except RecursionError:
        raise yaml.YAMLError("nested too deeply to be read") from None
    except _OF_PYTHON as error:
        raise yaml.YAMLError(f"cannot be read: {error}") from error
