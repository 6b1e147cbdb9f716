"""Rows into one table of SQLite's in WAL mode, from several programs, each row a transaction of its own.

rows.py make DATABASE                      makes the table
rows.py write DATABASE TABLE NAME          writes until `stop` is in the folder TABLE, and notes there each row that it
                                           begins, and each that was committed
rows.py judge DATABASE TABLE NAME...       compares the rows with what was noted
"""
import os, sqlite3, sys, time


def connect(path):
    database = sqlite3.connect(f"file:{path}?mode=rw", uri=True, timeout=100, isolation_level=None)
    assert database.execute("pragma journal_mode=wal").fetchone() == ("wal",)
    database.execute("pragma synchronous=full")
    return database


def make(path):
    os.close(os.open(path, os.O_RDWR | os.O_CREAT))
    connect(path).execute("create table rows(name text, number integer, filling text)")


def write(path, folder, name):
    with open(f"{folder}/rows-{name}", "a") as noted:
        number, database = 0, connect(path)
        while not os.path.exists(folder + "/stop"):
            noted.write(f"b {number}\n")
            noted.flush()
            database.execute("insert into rows values(?, ?, ?)", (name, number, "x" * 100))
            noted.write(f"c {number}\n")
            noted.flush()
            number += 1
            time.sleep(0.005)


def judge(path, folder, names):
    database = connect(path)
    said = [row[0] for row in database.execute("pragma integrity_check")]
    assert said == ["ok"], said
    rows = list(database.execute("select name, number from rows"))
    assert len(rows) == len(set(rows)), "a row is there twice"
    for name in names:
        with open(f"{folder}/rows-{name}") as noted:
            noted = [line.split() for line in noted]
        committed = {(name, int(number)) for kind, number in noted if kind == "c"}
        begun = {(name, int(number)) for kind, number in noted if kind == "b"}
        there = {row for row in rows if row[0] == name}
        assert not committed - there and not there - begun, f"lost: {sorted(committed - there)}"
    print("right", len(rows))


verb, path = sys.argv[1:3]
if verb == "make":
    make(path)
elif verb == "judge":
    judge(path, sys.argv[3], sys.argv[4:])
else:
    folder, name = sys.argv[3:5]
    write(path, folder, name)
    print("worked", name)
