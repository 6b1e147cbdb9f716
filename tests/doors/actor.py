"""One program at a file of the tree, told what to do line by line; each answer is a line."""
import fcntl, mmap, os, signal, sqlite3, sys, threading

files, maps, databases = {}, {}, []


def text(data):
    return data.decode("latin-1").replace("\0", ".")


def race(path, pages):
    """One thread writes half of each page, another stores to the other half of it through a map."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    os.ftruncate(file, pages * 4096)
    shared = mmap.mmap(file, pages * 4096)

    def store():
        for page in range(pages):
            shared[page * 4096 + 2048:page * 4096 + 2056] = b"storedIt"

    thread = threading.Thread(target=store)
    thread.start()
    for page in range(pages):
        os.pwrite(file, b"writtenX", page * 4096)
    thread.join()
    shared.flush()
    wrong = sum(
        (os.pread(file, 8, page * 4096), os.pread(file, 8, page * 4096 + 2048)) != (b"writtenX", b"storedIt")
        for page in range(pages))
    shared.close()
    os.close(file)
    return wrong


def alone(path, first, rounds):
    """What a database does, again and again."""
    for number in range(first, first + rounds):
        file = files[path]
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 10, 5)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.pwrite(file, b"%08d" % number, 0)
        os.fsync(file)
        assert os.fstat(file).st_size == 8 and os.pread(file, 8, 0) == b"%08d" % number
        fcntl.lockf(file, fcntl.LOCK_UN, 10, 5)
        fcntl.flock(file, fcntl.LOCK_UN)
    return rounds


def act(verb, *rest):
    if verb == "open":
        path, flags = rest
        files[path] = os.open(path, eval(flags, vars(os)), 0o644)
        return "ok"
    if verb == "close":
        os.close(files.pop(rest[0]))
        return "ok"
    if verb == "map":
        maps[rest[0]] = mmap.mmap(files[rest[0]], int(rest[1]))
        return "ok"
    if verb == "block_sigbus":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGBUS})
        return "ok"
    if verb == "lock":
        fcntl.lockf(files[rest[0]], fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
        return "ok"
    if verb == "database":
        database = sqlite3.connect(rest[0], isolation_level=None)
        database.execute("pragma journal_mode=wal")
        database.execute("create table if not exists rows(number integer)")
        databases.append(database)
        return "ok"
    if verb == "row":
        databases[-1].execute("insert into rows values(?)", (int(rest[0]),))
        return "ok"
    if verb == "rows":
        (count,), (check,) = (databases[-1].execute(what).fetchone()
                              for what in ("select count(*) from rows", "pragma integrity_check"))
        return f"{count} {check}"
    if verb == "sync_all":
        os.sync()
        return "ok"
    if verb == "store":
        maps[rest[0]][int(rest[1]):int(rest[1]) + len(rest[2])] = rest[2].encode()
        return "ok"
    if verb == "load":
        return text(maps[rest[0]][int(rest[1]):int(rest[1]) + int(rest[2])])
    if verb == "unmap":
        maps.pop(rest[0]).close()
        return "ok"
    if verb == "flush":
        maps[rest[0]].flush()
        return "ok"
    if verb == "write":
        return str(os.pwrite(files[rest[0]], rest[2].encode(), int(rest[1])))
    if verb == "append":
        return str(os.write(files[rest[0]], rest[1].encode()))
    if verb == "fill":
        return str(os.write(files[rest[0]], rest[1].encode() * int(rest[2])))
    if verb == "read":
        return text(os.pread(files[rest[0]], int(rest[2]), int(rest[1])))
    if verb == "sync":
        os.fsync(files[rest[0]])
        return "ok"
    if verb == "cut":
        os.ftruncate(files[rest[0]], int(rest[1]))
        return "ok"
    if verb == "size":
        return str(os.stat(rest[0]).st_size)
    if verb == "mode":
        return oct(os.stat(rest[0]).st_mode & 0o7777)
    if verb == "there":
        return str(os.path.exists(rest[0]))
    if verb == "whole":
        with open(rest[0], "rb") as file:
            return text(file.read())
    if verb == "churn":
        for number in range(int(rest[1])):
            made, name = f"{rest[0]}/t{number}", f"{rest[0]}/f{number}"
            file = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            os.write(file, b"x" * 4096)
            os.close(file)
            os.rename(made, name)
        return rest[1]
    if verb == "another":
        child = os.fork()
        if child == 0:
            os.setgroups([])
            os.setgid(12345)
            os.setuid(12345)
            try:
                os.close(os.open(rest[0], os.O_RDWR))
            except OSError as error:
                os._exit(error.errno)
            os._exit(0)
        return str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    if verb == "store_all":
        for at in range(0, int(rest[1]), 4096):
            maps[rest[0]][at:at + len(rest[2])] = rest[2].encode()
        return "ok"
    if verb == "check_all":
        pages = range(0, int(rest[1]), 4096)
        return str(sum(os.pread(files[rest[0]], len(rest[2]), at) != rest[2].encode() for at in pages))
    if verb == "stats":
        return str(sum(os.stat(f"{rest[0]}/f{number}").st_size == 4096 for number in range(int(rest[1]))))
    if verb == "race":
        return str(race(rest[0], int(rest[1])))
    if verb == "alone":
        return str(alone(rest[0], int(rest[1]), int(rest[2])))
    if verb == "list":
        return " ".join(sorted(os.listdir(rest[0])))
    return str(getattr(os, verb)(*(eval(part) if part.startswith("0") else part for part in rest)))


for line in sys.stdin:
    try:
        print(act(*line.split()), flush=True)
    except OSError as error:
        print(type(error).__name__, error.errno, flush=True)
    except sqlite3.Error as error:
        print("Error", error, flush=True)
