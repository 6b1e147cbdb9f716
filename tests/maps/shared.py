"""Shared maps of files in a tree that this process has through the library: what POSIX says of them.

shared.py TREE; prints a line for each thing that is not so, and then how many things were asked."""

import mmap
import os
import sys

tree = sys.argv[1]
asked = 0


def same(what, found, wanted):
    global asked
    asked += 1
    if found != wanted:
        print(f"WRONG: {what}: {found!r} is not {wanted!r}")


def fresh(name, contents):
    fd = os.open(f"{tree}/{name}", os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    os.write(fd, contents)
    return fd


def child(act):
    """Runs something in a forked child; its exit code."""
    pid = os.fork()
    if pid == 0:
        try:
            act()
            os._exit(0)
        except BaseException as why:
            print(f"WRONG: in a child: {why!r}", flush=True)
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# A store is seen by reads, a write in the map, through any descriptor of the file, whoever maps it.
fd = fresh("one", b"x" * 10000)
other = os.open(f"{tree}/one", os.O_RDWR)
reader = os.open(f"{tree}/one", os.O_RDONLY)
one = mmap.mmap(fd, 10000)
twice = mmap.mmap(reader, 10000, prot=mmap.PROT_READ)
same("what was written before", one[:3], b"xxx")
one[0:5] = b"hello"
same("pread", os.pread(fd, 7, 0), b"helloxx")
same("another descriptor", os.pread(other, 7, 0), b"helloxx")
same("another map", twice[:7], b"helloxx")
same("pwrite", (os.pwrite(other, b"WORLD", 5), one[:11], twice[:11]), (5, b"helloWORLDx", b"helloWORLDx"))
same("stat is of the same file", (os.fstat(fd).st_dev, os.fstat(fd).st_ino), (lambda s: (s.st_dev, s.st_ino))(os.stat(f"{tree}/one")))
with open(f"{tree}/one", "rb") as again:
    same("opened now", again.read(11), b"helloWORLDx")

# Offsets are those of the descriptions.
same("the offset", os.lseek(fd, 0, os.SEEK_CUR), 10000)
os.lseek(fd, 3, os.SEEK_SET)
same("read", (os.read(fd, 4), os.lseek(fd, 0, os.SEEK_CUR)), (b"loWO", 7))
same("write", (os.write(fd, b"--"), one[5:11], os.lseek(fd, 0, os.SEEK_CUR)), (2, b"WO--Dx", 9))
same("readv, writev", (os.readv(fd, [bytearray(1), bytearray(2)]), os.writev(fd, [b"a", b"bc"])), (3, 3))
same("what they did", one[7:16], b"--Dxxabcx")
same("the end", os.lseek(fd, 0, os.SEEK_END), 10000)

# Appending goes to the end.
appender = os.open(f"{tree}/one", os.O_WRONLY | os.O_APPEND)
same("append", (os.write(appender, b"end"), os.fstat(fd).st_size, os.lseek(appender, 0, os.SEEK_CUR)), (3, 10003, 10003))
same("what was appended", os.pread(fd, 5, 10000), b"end")
same("a store and an append on the same page", (one[9990:9995], os.pread(other, 13, 9990)), (b"xxxxx", b"x" * 10 + b"end"))

# Sizes.
os.ftruncate(fd, 20000)
longer = mmap.mmap(fd, 20000)
longer[19999:] = b"z"
same("a longer file", (os.fstat(other).st_size, os.pread(other, 2, 19998)), (20000, b"\0z"))
os.posix_fallocate(fd, 20000, 100)
same("fallocate", os.fstat(fd).st_size, 20100)
os.ftruncate(other, 4096)
same("a shorter file", (os.fstat(fd).st_size, os.pread(fd, 10, 4090)), (4096, b"xxxxxx"))
longer.close()

# What is synced is synced, in each way.
one[0:1] = b"H"
one.flush()
os.fsync(fd)
os.fdatasync(other)
same("after a sync", os.pread(reader, 5, 0), b"Hello")

# Locks are the process's, whatever is mapped.
import fcntl
fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 10, 0)
def no_lock():
    try:
        fcntl.lockf(os.open(f"{tree}/one", os.O_RDWR), fcntl.LOCK_EX | fcntl.LOCK_NB, 10, 0)
    except (BlockingIOError, PermissionError):
        return
    raise AssertionError("it was locked")
same("a lock", child(no_lock), 0)
fcntl.lockf(fd, fcntl.LOCK_UN, 10, 0)

# A removed file, a renamed one, one whose mode forbids everything.
os.rename(f"{tree}/one", f"{tree}/two")
os.chmod(f"{tree}/two", 0)
moved = mmap.mmap(other, 100)
same("a renamed file", (moved[:5], one[:5]), (b"Hello", b"Hello"))
os.unlink(f"{tree}/two")
removed = mmap.mmap(fd, 100)
removed[0:5] = b"HELLO"
same("a removed file", (moved[:5], os.pread(other, 5, 0)), (b"HELLO", b"HELLO"))

# A child has its parent's maps, and makes its own.
def in_child():
    assert one[:5] == b"HELLO" and os.pread(fd, 5, 0) == b"HELLO"
    one[0:5] = b"child"
    own = mmap.mmap(other, 100)
    assert own[:5] == b"child"
    own[5:10] = b"other"
    os.pwrite(fd, b"third", 10)
same("a child", child(in_child), 0)
same("what the child did", (one[:15], os.pread(fd, 15, 0)), (b"childotherthird",) * 2)

# Without the descriptors the map goes on.
for number in (fd, other, reader, appender):
    os.close(number)
one[0:5] = b"alone"
same("after the close", (moved[:5], removed[:5], twice[:5]), (b"alone",) * 3)
for map in (one, moved, removed, twice):
    map.close()

# The last map goes, and the file is the library's again; what was stored is there.
fd = fresh("three", b"y" * 4096)
map = mmap.mmap(fd, 4096)
map[0:4] = b"last"
map.close()
same("after the last map", os.pread(fd, 6, 0), b"lastyy")
os.pwrite(fd, b"LAST", 0)
map = mmap.mmap(fd, 4096)
same("and mapped again", map[:6], b"LASTyy")
map.resize(8192)
map[8191:] = b"e"
same("a map that grows", (os.fstat(fd).st_size, os.pread(fd, 1, 8191)), (8192, b"e"))
map.close()

# Mapped again and again, with calls in between that change what was mapped and the size.
fd = fresh("four", b"")
wrong = []
for turn in range(200):
    stamp = b"%06d" % turn
    os.pwrite(fd, stamp, 4096 * turn)
    os.pwrite(fd, stamp, 0)
    map = mmap.mmap(fd, 4096 * turn + 6)
    if (map[:6], map[4096 * turn :]) != (stamp, stamp):
        wrong.append(turn)
    map[0:6] = b"stored"
    map.close()
    if os.pread(fd, 6, 0) != b"stored":
        wrong.append(-turn)
same("in turns", wrong, [])

# What is refused.
def error(act):
    try:
        act()
    except OSError as why:
        return why.errno
import errno
reader = os.open(f"{tree}/three", os.O_RDONLY)
writer = os.open(f"{tree}/three", os.O_WRONLY)
same("a map to be written to of a file open for reading", error(lambda: mmap.mmap(reader, 10)), errno.EACCES)
same("one of a file open for writing", error(lambda: mmap.mmap(writer, 10, prot=mmap.PROT_READ)), errno.EACCES)
same("one of a folder", error(lambda: mmap.mmap(os.open(tree, os.O_RDONLY), 10, prot=mmap.PROT_READ)), errno.ENODEV)

# A copy within one file ends where the file ended before it, and its ranges are apart.
one = fresh("four", b"abcdef")
held = mmap.mmap(one, 6)
same("a copy within a file", os.copy_file_range(one, one, 55, 1, 4095), 5)
same("its end", (os.fstat(one).st_size, os.pread(one, 9, 4095)), (4100, b"bcdef"))
long = 192 << 10
os.pwrite(one, b"z" * long, 0)
same("a long copy within a file", os.copy_file_range(one, one, 1 << 20, 0, long), long)
same("its end", os.fstat(one).st_size, 2 * long)
same("ranges that overlap", error(lambda: os.copy_file_range(one, one, 100, 0, 50)), errno.EINVAL)
same("behind the end", os.copy_file_range(one, one, 10, 3 * long, 0), 0)

# A file that another process changes is no stale copy in a map for reading.
seen = mmap.mmap(reader, 4096, prot=mmap.PROT_READ)
before = seen[:4]
def change():
    own = os.open(f"{tree}/three", os.O_RDWR)
    mmap.mmap(own, 4096)[0:4] = b"news"
same("another process stores", (before, child(change), seen[:4]), (b"LAST", 0, b"news"))

print(f"{asked} asked")
