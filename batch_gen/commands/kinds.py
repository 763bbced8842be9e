"""Kinds of values on the command line that click has no type for."""

from __future__ import annotations

import math
import re
from typing import Any, Final

import click

from batch_gen.errors import UsageError

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_CASE: Final = re.compile(r"(?!\.+$)[A-Za-z0-9._-]{1,140}")


class Amount(click.ParamType):  # type: ignore[type-arg]  # old releases of click have no generic one
    """A finite number, 0 or more: seconds, hours, money."""

    name = "float"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number; click's own error for anything else."""
        number = float(click.FLOAT.convert(value, param, ctx))
        if not (math.isfinite(number) and number >= 0):
            self.fail(f"{value!r} is not a finite number of 0 or more.", param, ctx)
        return number


class Name(click.ParamType):  # type: ignore[type-arg]  # as above
    """A name that becomes part of a key in a store: of a night, a case or a variant."""

    name = "text"

    def __init__(self, what: str) -> None:
        self.what = what
        self._pattern = _CASE if what == "case" else _NAME

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:  # noqa: ARG002 - of click
        """The name; UsageError where it would lead elsewhere."""
        text = str(value)
        if not self._pattern.fullmatch(text.replace(":", "") if self.what == "night" else text):
            said = param.opts[0] if isinstance(param, click.Option) else self.what
            raise UsageError(f"{said} {text}: expected the name of a {self.what}: letters, digits, '.', '-' and '_'")
        return text
