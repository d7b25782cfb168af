"""The exceptions of the data tools."""

from __future__ import annotations

from config_utils.errors import UserError


class BadInput(UserError):
    """The user's input cannot be used; the message is one sentence that says what, where and why."""


class ShardError(BadInput):
    """One shard cannot be read or tokenised; the other shards are not affected."""


class OutputError(Exception):
    """The output folder cannot be written (full, read-only, vanished); the whole run stops."""
