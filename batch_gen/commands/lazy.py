"""Groups of commands that are imported when somebody asks for them, so that `--help` stays quick."""

from __future__ import annotations

import click


class RegressGroup(click.Group):
    """`batch-gen regress ...`: its commands come from regress.py and regress_tiers.py."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Their names."""
        return [*super().list_commands(ctx), *_regress_commands()]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """One of them."""
        return _regress_commands().get(cmd_name) or super().get_command(ctx, cmd_name)


def _regress_commands() -> dict[str, click.Command]:
    from batch_gen.commands import regress, regress_tiers

    return {**regress.COMMANDS, **regress_tiers.COMMANDS}
