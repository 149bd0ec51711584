"""A SuperLink that waits for its database: `python -m qupel.flower.superlink`, then the options of flower-superlink.

Flower's own (flwr 1.41) gives up on a locked database after 5 seconds and answers 500; a client that is told so has
lost its question, and is silent until the round's deadline. Twenty clients on a busy machine are enough for that.
"""

from __future__ import annotations

import sys

BUSY = "busy_timeout"  # the name of SQLite's setting, in milliseconds
PATIENCE = "60000"


def wait_for_database() -> None:
    """Let all connections to come have this patience."""
    from flwr.supercore import sql_mixin

    kept = [(name, value) for name, value in sql_mixin.SQLITE_PRAGMAS if name != BUSY]
    sql_mixin.SQLITE_PRAGMAS = ((BUSY, PATIENCE), *kept)  # type: ignore[assignment]


def main() -> None:
    from flwr.superlink.cli.flower_superlink import flower_superlink

    wait_for_database()
    sys.argv[0] = "flower-superlink"
    flower_superlink()


if __name__ == "__main__":
    main()
