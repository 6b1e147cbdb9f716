"""A program whose log loses the record of one file, and that syncs in some way then: syncs.py FOLDER fsync|syncfs|sync|msync.

Prints whether a sync acknowledged what is lost.
"""
import ctypes
import mmap
import os
import sys

folder, kind = sys.argv[1:]
libc = ctypes.CDLL(None, use_errno=True)
changed, other = (os.open(f"{folder}/{kind}-{name}", os.O_RDWR | os.O_CREAT | os.O_EXCL) for name in ("changed", "other"))
for file in (changed, other):
    os.pwrite(file, b"former".ljust(4096), 0)
    os.fsync(file)
mapped = mmap.mmap(other, 4096) if kind == "msync" else None


def succeeds(sync):
    try:
        return sync() in (0, None)
    except OSError:
        return False


def log():
    for line in open("/proc/self/maps"):
        path = line[line.find("/"):].strip()
        name = os.path.basename(path)
        if name.startswith("log-") and not name.endswith("-locks"):
            return path


os.pwrite(changed, b"latter", 0)
path = log()
size = os.stat(path).st_size
os.truncate(path, 0)
os.truncate(path, size)
if kind == "sync":
    # It tells no program anything.
    libc.sync()
ways = {"syncfs": lambda: libc.syncfs(other), "msync": lambda: mapped.flush()}
synced = succeeds(ways.get(kind, lambda: os.fsync(other)))
there = os.pread(changed, 6, 0) == b"latter"
print("acknowledged what is lost" if synced and not there else "right")
