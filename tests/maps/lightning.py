"""Four processes write to one database of LMDB, which they map, at once: lightning.py FOLDER."""

import os
import sys

import lmdb


def opened():
    return lmdb.open(f"{sys.argv[1]}/lightning", map_size=1 << 24)


children = []
for process in range(4):
    child = os.fork()
    if child == 0:
        database = opened()
        for number in range(100):
            with database.begin(write=True) as transaction:
                transaction.put(f"{process}-{number}".encode(), b"v" * 50)
        os._exit(0)
    children.append(child)
codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
with opened().begin() as transaction:
    print(codes, transaction.stat()["entries"])
