"""Rows into a table of SQLite's in WAL mode, each a transaction of its own.

wal.py DATABASE NAME FIRST LAST ACKNOWLEDGED: writes the number of each row that was committed into ACKNOWLEDGED.
wal.py DATABASE: makes the table."""

import sqlite3
import sys


def tell(kind, error, trace):
    """Names SQLite's extended error, which says which of its calls failed."""
    print(getattr(error, "sqlite_errorname", ""), file=sys.stderr)
    sys.__excepthook__(kind, error, trace)


sys.excepthook = tell
database = sqlite3.connect(sys.argv[1], timeout=100, isolation_level=None)
assert database.execute("pragma journal_mode=wal").fetchone() == ("wal",)
if len(sys.argv) == 2:
    database.execute("create table rows(name text, number integer, filling text)")
    sys.exit()
_, _, name, first, last, acknowledged = sys.argv
with open(acknowledged, "a") as acknowledged:
    for number in range(int(first), int(last)):
        database.execute("begin immediate")
        database.execute("insert into rows values(?, ?, ?)", (name, number, "x" * 300))
        database.execute("commit")
        acknowledged.write(f"{number}\n")
        acknowledged.flush()
    if name == "a":
        database.execute("pragma wal_checkpoint(truncate)")
