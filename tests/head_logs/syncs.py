"""A program whose log loses the record of one file, and that syncs in some way then: syncs.py FOLDER fsync|syncfs|sync|msync.

Does that several times, with two files each: FOLDER/KIND-ROUND-changed and -other. Prints for each time whether a sync acknowledged
the record.
"""
import ctypes
import mmap
import os
import sys

ROUNDS = 4
folder, kind = sys.argv[1:]
libc = ctypes.CDLL(None, use_errno=True)


def succeeds(sync):
    try:
        return sync() in (0, None)
    except OSError:
        return False


def former(name):
    file = os.open(f"{folder}/{kind}-{name}", os.O_RDWR | os.O_CREAT, 0o644)
    os.pwrite(file, b"former".ljust(4096), 0)
    # A sync may still tell of the damage of the time before.
    return file if succeeds(lambda: os.fsync(file)) else former(name)


def damage_log():
    for line in open("/proc/self/maps"):
        path = line[line.find("/"):].strip()
        name = os.path.basename(path)
        if name.startswith("log-") and not name.endswith("-locks"):
            size = os.stat(path).st_size
            os.truncate(path, 0)
            os.truncate(path, size)


for number in range(ROUNDS):
    changed, other = (former(f"{number}-{name}") for name in ("changed", "other"))
    mapped = mmap.mmap(other, 4096) if kind == "msync" else None
    os.pwrite(changed, b"latter", 0)
    damage_log()
    if kind == "sync":
        # It tells no program anything.
        libc.sync()
    ways = {"syncfs": lambda: libc.syncfs(other), "msync": lambda: mapped.flush()}
    print(succeeds(ways.get(kind, lambda: os.fsync(other))))
