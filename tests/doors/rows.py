"""Rows into one table of SQLite's in WAL mode, from several programs, each row a transaction of its own.

rows.py make DATABASE                      makes the table
rows.py write DATABASE TABLE NAME [dies]   writes until `stop` is in the folder TABLE, and notes there each row that it
                                           begins, and each that was committed; `dies`: the mount may be killed, and with
                                           it the mapped index: calls fail, or the program ends
rows.py judge DATABASE TABLE NAME...       compares the rows with what was noted
"""
import os, signal, sqlite3, sys, time, traceback


def connect(path):
    database = sqlite3.connect(f"file:{path}?mode=rw", uri=True, timeout=100, isolation_level=None)
    assert database.execute("pragma journal_mode=wal").fetchone() == ("wal",)
    database.execute("pragma synchronous=full")
    return database


def make(path):
    os.close(os.open(path, os.O_RDWR | os.O_CREAT))
    connect(path).execute("create table rows(name text, number integer, filling text)")


def write(path, folder, name, dies):
    with open(f"{folder}/rows-{name}", "a+") as noted:
        noted.seek(0)
        number, database = sum(line.startswith("b") for line in noted), None
        while not os.path.exists(folder + "/stop"):
            try:
                database = database or connect(path)
                noted.write(f"b {number}\n")
                noted.flush()
                number += 1
                database.execute("insert into rows values(?, ?, ?)", (name, number - 1, "x" * 100))
                noted.write(f"c {number - 1}\n")
                noted.flush()
            except sqlite3.DatabaseError:
                if not dies:
                    raise
                # There is another mount in a moment. For SQLite, a read that fails with EIO is a damaged database.
                if database:
                    database.close()
                database = None
            time.sleep(0.005)


def supervise(begin):
    """A program that dies by SIGBUS or SIGKILL, when its mount is killed, is followed by another."""
    while True:
        child = os.fork()
        if child == 0:
            try:
                begin()
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        status = os.waitpid(child, 0)[1]
        if not os.WIFSIGNALED(status) or os.WTERMSIG(status) not in (signal.SIGBUS, signal.SIGKILL):
            assert status == 0, f"status {status}"
            return


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
    if "dies" in sys.argv[5:]:
        supervise(lambda: write(path, folder, name, True))
    else:
        write(path, folder, name, False)
    print("worked", name)
