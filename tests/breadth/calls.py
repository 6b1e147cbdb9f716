# Calls that few programs make, each with what it has to do; run in an empty folder by tests/breadth.rs. Where a call may
# be refused, the line that is printed says so: `NAME works` or `NAME ERRNO`.
import ctypes, errno, os

libc = ctypes.CDLL(None, use_errno=True)
long = ctypes.c_long


def call(function, *arguments):
    result = function(*arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), function.__name__)
    return result


def fails(code, act):
    try:
        act()
    except OSError as why:
        assert why.errno == code, why
        return
    raise AssertionError(f"it should have failed with {errno.errorcode[code]}")


def attempt(name, allowed, act):
    try:
        act()
    except OSError as why:
        assert why.errno in allowed, (name, why)
        print(name, "EOPNOTSUPP" if why.errno == errno.EOPNOTSUPP else errno.errorcode[why.errno])
        return
    print(name, "works")


def put(name, data):
    with open(name, "wb") as file:
        file.write(data)


def get(name):
    with open(name, "rb") as file:
        return file.read()


def renames():
    rename = lambda old, new, flags: call(libc.renameat2, -100, old.encode(), -100, new.encode(), flags)
    put("a", b"a")
    put("b", b"b")
    rename("a", "b", 2)
    assert (get("a"), get("b")) == (b"b", b"a"), "exchanged"
    fails(errno.EEXIST, lambda: rename("a", "b", 1))
    fails(errno.ENOENT, lambda: rename("a", "none", 2))
    fails(errno.EINVAL, lambda: rename("a", "b", 3))
    rename("a", "c", 1)
    assert get("c") == b"b" and not os.path.exists("a")
    os.mkdir("d")
    rename("c", "d", 2)
    assert os.path.isdir("c") and get("d") == b"b", "a file and a folder"
    os.rmdir("c")


def holes():
    fd = os.open("f", os.O_RDWR | os.O_CREAT)
    fallocate = lambda mode, at, count: call(libc.fallocate, fd, mode, long(at), long(count))
    size = lambda: os.fstat(fd).st_size
    os.write(fd, b"x" * 8192)
    fallocate(1, 0, 1 << 20)
    assert size() == 8192, "KEEP_SIZE"
    fallocate(0, 0, 20000)
    assert size() == 20000
    fallocate(3, 4000, 200)
    assert os.pread(fd, 20000, 0) == b"x" * 4000 + bytes(200) + b"x" * 3992 + bytes(11808)
    fails(errno.EOPNOTSUPP, lambda: fallocate(2, 0, 4096))
    fails(errno.EINVAL, lambda: fallocate(0, 0, 0))
    os.posix_fallocate(fd, 0, 30000)
    assert size() == 30000
    os.ftruncate(fd, 0)
    os.ftruncate(fd, 1 << 20)
    os.pwrite(fd, b"data", 1 << 19)
    assert os.lseek(fd, 0, os.SEEK_HOLE) == 0
    assert 0 < os.lseek(fd, 0, os.SEEK_DATA) <= 1 << 19
    assert os.lseek(fd, 1 << 19, os.SEEK_DATA) == 1 << 19
    assert 1 << 19 < os.lseek(fd, 1 << 19, os.SEEK_HOLE) < 1 << 20
    fails(errno.ENXIO, lambda: os.lseek(fd, 600000, os.SEEK_DATA))
    fails(errno.ENXIO, lambda: os.lseek(fd, 1 << 20, os.SEEK_HOLE))
    call(libc.sync_file_range, fd, long(0), long(0), 7)
    os.fdatasync(fd)
    os.close(fd)


def between_descriptors():
    data = bytes(range(256)) * 64
    put("from", data)
    allowed = {errno.EINVAL, errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF}

    def copy():
        with open("from", "rb") as source, open("to", "wb") as target:
            done = 0
            while done < len(data):
                done += os.copy_file_range(source.fileno(), target.fileno(), len(data) - done)
        assert get("to") == data

    def send():
        with open("from", "rb") as source:
            read, write = os.pipe()
            assert os.sendfile(write, source.fileno(), 100, 3000) == 3000
            assert os.read(read, 4000) == data[100:3100]

    def receive():
        with open("from", "rb") as source, open("to", "wb") as target:
            done = 0
            while done < len(data):
                done += os.sendfile(target.fileno(), source.fileno(), done, len(data) - done)
        assert get("to") == data

    def splice():
        with open("from", "rb") as source:
            read, write = os.pipe()
            assert os.splice(source.fileno(), write, 3000, offset_src=100) == 3000
            assert os.read(read, 4000) == data[100:3100]

    def nameless():
        fd = os.open(".", os.O_TMPFILE | os.O_RDWR)
        os.write(fd, b"x")
        os.close(fd)

    attempt("copy_file_range", allowed, copy)
    attempt("sendfile-out", allowed, send)
    attempt("sendfile-in", allowed, receive)
    attempt("splice", allowed, splice)
    attempt("O_TMPFILE", set(), nameless)


def attributes():
    put("s", b"12345")
    buffer = (ctypes.c_uint64 * 32)()
    call(libc.statx, -100, b"s", 0, 0xFFF, buffer)
    whole = bytes(buffer)
    status = os.stat("s")
    number = lambda at, count: int.from_bytes(whole[at : at + count], "little")
    assert number(0, 4) & 0x7FF == 0x7FF and number(16, 4) == 1 and number(28, 2) == status.st_mode
    assert (number(32, 8), number(40, 8)) == (status.st_ino, 5)
    assert number(0, 4) & 0x800 and number(80, 8) > 1 << 30, "the time of its making"
    os.setxattr("s", "user.a", b"1", os.XATTR_CREATE)
    fails(errno.EEXIST, lambda: os.setxattr("s", "user.a", b"2", os.XATTR_CREATE))
    fails(errno.ENODATA, lambda: os.setxattr("s", "user.b", b"2", os.XATTR_REPLACE))
    os.setxattr("s", "user.b", b"v" * 60000)
    assert sorted(os.listxattr("s")) == ["user.a", "user.b"] and os.getxattr("s", "user.b") == b"v" * 60000
    os.removexattr("s", "user.a")
    fails(errno.ENODATA, lambda: os.getxattr("s", "user.a"))
    fails(errno.ENODATA, lambda: os.removexattr("s", "user.a"))


def names():
    longest = "n" * 255
    put(longest, b"1")
    assert get(longest) == b"1" and longest in os.listdir(".")
    fails(errno.ENAMETOOLONG, lambda: put(longest + "n", b"1"))
    odd = bytes(byte for byte in range(1, 256) if byte != ord("/"))
    put(odd, b"2")
    assert odd in os.listdir(b".") and get(odd) == b"2"
    fails(errno.ENAMETOOLONG, lambda: os.stat("d/" * 2048 + "f"))
    attempt("deep-path", set(), deep)


def deep():
    # A path longer than any call takes, step by step.
    top = os.open(".", os.O_DIRECTORY)
    for _ in range(60):
        os.mkdir("e" * 100)
        os.chdir("e" * 100)
    put("bottom", b"3")
    assert get("bottom") == b"3"
    os.unlink("bottom")
    for _ in range(60):
        os.chdir("..")
        os.rmdir("e" * 100)
    assert os.stat(".").st_ino == os.fstat(top).st_ino, "up again where it began"
    os.close(top)


def listings():
    pointer = ctypes.c_void_p
    for function, result, takes in [
        (libc.opendir, pointer, [ctypes.c_char_p]),
        (libc.readdir, pointer, [pointer]),
        (libc.telldir, long, [pointer]),
        (libc.seekdir, None, [pointer, long]),
        (libc.rewinddir, None, [pointer]),
        (libc.closedir, ctypes.c_int, [pointer]),
    ]:
        function.restype, function.argtypes = result, takes
    os.mkdir("many")
    for n in range(1000):
        put(f"many/old-{n}", b"")
    stream = libc.opendir(b"many")

    def following(most=10000):
        found = []
        while len(found) < most:
            entry = libc.readdir(stream)
            if not entry:
                break
            found.append(ctypes.string_at(entry + 19).decode())
        return found

    first = following(300)
    place = libc.telldir(stream)
    second = following(300)
    gone = {name for name in (first + second)[::3] if name.startswith("old")}
    for n, name in enumerate(sorted(gone)):
        os.unlink(f"many/{name}")
        put(f"many/new-{n}", b"")
    rest = following()
    old = lambda found: [name for name in found if name.startswith("old")]
    seen = old(first + second + rest)
    assert len(seen) == len(set(seen)) and set(seen) == {f"old-{n}" for n in range(1000)}, "each once"
    libc.seekdir(stream, place)
    again = following()
    assert old(again) == [name for name in old(second + rest) if name not in gone], "goes on where it was"
    libc.rewinddir(stream)
    assert sorted(following()) == sorted(os.listdir("many") + [".", ".."])
    libc.closedir(stream)


for part in (renames, holes, between_descriptors, attributes, names, listings):
    here = os.getcwd()
    os.mkdir(part.__name__)
    os.chdir(part.__name__)
    part()
    os.chdir(here)
