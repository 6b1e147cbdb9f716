//! A process that becomes another user goes on with what it has open and locked, and may do from then on what that user
//! may: a mail server that drops its rights, a daemon that takes them back for a moment.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test ends where something unexpected is")]

#[path = "harness/mod.rs"]
mod harness;

use harness::{Expect, Node, limited};
use std::os::unix::fs::PermissionsExt;

/// The output of a Python script in the tree, as words; none without the right to become another user.
fn words(node: &Node, script: &str) -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: needs root");
        return None;
    }
    let script = format!("{PREAMBLE}\nT = '{}'\n{script}", node.path(""));
    let text = node.hearth(&["run", "--", "python3", "-c", &script]).expect_success();
    Some(text.split_whitespace().collect::<Vec<_>>().join(" "))
}

const PREAMBLE: &str = r#"
import errno, fcntl, os, subprocess, sys, threading
def become(user):
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
def refused(call, *arguments):
    try:
        call(*arguments)
        return 'done'
    except OSError as error:
        return errno.errorcode[error.errno]
def owner(path):
    status = os.stat(path)
    return '%d:%d' % (status.st_uid, status.st_gid)
def put(path, text, mode=0o644):
    with open(path, 'w') as file:
        file.write(text)
    os.chmod(path, mode)
"#;

#[test]
fn what_is_open_and_locked_stays_and_what_is_allowed_changes() {
    let node = Node::up();
    let found = words(
        &node,
        r#"
os.chmod(T, 0o777)
put(T + '/secret', 'hers', 0o600)
log = open(T + '/log', 'a+'); log.write('root\n'); log.flush()
os.chmod(T + '/log', 0o600)
gone = open(T + '/gone', 'w+'); gone.write('nameless'); gone.flush(); os.unlink(T + '/gone')
lock = open(T + '/lock', 'w'); fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
flocked = open(T + '/flocked', 'w'); fcntl.flock(flocked, fcntl.LOCK_EX | fcntl.LOCK_NB)
for name in ('lock', 'flocked'): os.chmod(T + '/' + name, 0o666)
os.chdir(T)
become(12345)
log.write('other\n'); log.flush(); log.seek(0)
print(*log.read().split())
gone.seek(0); print(gone.read())
print(refused(open, 'secret'), refused(open, T + '/log'), refused(os.chmod, 'lock', 0))
put('mine', 'x'); print(owner('mine'), owner(T + '/secret'))
for call, name in ((fcntl.lockf, 'lock'), (fcntl.flock, 'flocked')):
    child = os.fork()
    if child == 0:
        os._exit(0 if refused(call, open(name, 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB) == 'EAGAIN' else 1)
    print('held' if os.waitpid(child, 0)[1] == 0 else 'free')
os.fsync(log.fileno())
"#,
    );
    let Some(found) = found else { return };
    assert_eq!(found, "root other nameless EACCES EACCES EPERM 12345:12345 0:0 held held");
}

#[test]
fn back_and_forth_and_over_an_exec() {
    let node = Node::up();
    let found = words(
        &node,
        r#"
os.chmod(T, 0o777); os.chdir(T)
for round in range(20):
    os.setegid(1000 + round); os.seteuid(1000 + round)
    put('f%d' % round, 'x')
    os.seteuid(0); os.setegid(0)
    put('r%d' % round, 'x', 0o600)
print(*sorted({owner('r%d' % round) for round in range(20)}))
print(all(owner('f%d' % round) == '%d:%d' % (1000 + round, 1000 + round) for round in range(20)))
os.seteuid(1000)
print(refused(open, 'r0'), os.access('r0', os.R_OK))
os.seteuid(0)
file = open('r1', 'r+')
become(2000)
os.dup2(file.fileno(), 0)
sys.stdout.flush()
os.execvp('sh', ['sh', '-c', 'cat; echo; cat r2 2>/dev/null || echo refused; >s; stat -c %u s'])
"#,
    );
    let Some(found) = found else { return };
    assert_eq!(found, "0:0 True EACCES True x refused 2000");
}

#[test]
fn locks_stay_over_any_number_of_changes() {
    let node = Node::up();
    let found = words(
        &node,
        r#"
os.chmod(T, 0o777); os.chdir(T)
files = {}
for kind, lock in (('lockf', fcntl.lockf), ('flock', fcntl.flock)):
    files[kind] = os.open(kind, os.O_CREAT | os.O_RDWR); os.fchmod(files[kind], 0o666)
    lock(files[kind], fcntl.LOCK_EX)
ask, asked = os.pipe(); tell, told = os.pipe()
if os.fork() == 0:
    for fd in files.values(): os.close(fd)
    while os.read(ask, 1) == b'?':
        held = [refused(getattr(fcntl, kind), os.open(kind, os.O_RDWR), fcntl.LOCK_EX | fcntl.LOCK_NB) for kind in files]
        os.write(told, b'h' if held == ['EAGAIN', 'EAGAIN'] else b's')
    os._exit(0)
def probe(): os.write(asked, b'?'); return os.read(tell, 1).decode()
seen = probe()
for user in (1001, 0, 1002, 1003, 0, 1001):
    os.seteuid(0); os.seteuid(user); os.stat(T)
    seen += probe()
print(seen)
failed = 0
for round in range(200):
    os.seteuid(0); os.seteuid(1000 + round % 5)
    try: os.stat(T); os.close(os.open('flock', os.O_RDONLY))
    except OSError: failed += 1
print(failed)
os.seteuid(0); print(probe()); os.write(asked, b'.')
"#,
    );
    let Some(found) = found else { return };
    assert_eq!(found, "hhhhhhh 0 h");
}

#[test]
fn threads_write_on_while_one_changes_the_user() {
    let node = Node::up();
    let found = words(
        &node,
        r#"
os.chmod(T, 0o777); os.chdir(T)
stop, wrong = threading.Event(), []
def write(number):
    count = 0
    with open('t%d' % number, 'wb', buffering=0) as file:
        while not stop.is_set() or count < 100:
            count += file.write(b'%08d' % count) // 8
    data = open('t%d' % number, 'rb').read()
    if data != b''.join(b'%08d' % index for index in range(count)): wrong.append(number)
def churn():
    # Whoever it is: each call is one user's, and none is lost.
    count = 0
    while not stop.is_set():
        try:
            os.mkdir('d%d' % count); os.rename('d%d' % count, 'e%d' % count); os.rmdir('e%d' % count)
        except PermissionError: pass
        count += 1
threads = [threading.Thread(target=write, args=(number,)) for number in range(3)]
threads.append(threading.Thread(target=churn))
for thread in threads: thread.start()
for round in range(30):
    os.seteuid(1000 + round); put('by%d' % round, 'x'); os.seteuid(0)
stop.set()
for thread in threads: thread.join()
print(wrong, all(owner('by%d' % round).startswith('%d:' % (1000 + round)) for round in range(30)))
"#,
    );
    let Some(found) = found else { return };
    assert_eq!(found, "[] True");
    let status = node.hearth(&["status", "--json"]).expect_success();
    assert!(status.contains("\"forced_ends\": []"), "{status}");
}

/// A file that root gives to itself stays open for the process that made it, and for its children. If the daemon dies
/// meanwhile, before or after root did that, it is no different.
#[test]
fn a_file_that_is_given_away_stays_its_makers_to_use() {
    for killed in ["never", "before", "after"] {
        let node = Node::up();
        let script = r#"
def turn(read, write): os.write(write, b'x'); os.read(read, 1)
os.chmod(T, 0o777); os.chdir(T)
ours, to_us = os.pipe(); theirs, to_them = os.pipe()
if os.fork() == 0:
    become(12345)
    made = os.open('made', os.O_CREAT | os.O_RDWR, 0o600); os.write(made, b'before ')
    turn(theirs, to_us)
    os.write(made, b'after '); os.fsync(made)
    if os.fork() == 0:
        os.write(made, b'child '); os._exit(0)
    os.wait()
    print(os.pread(made, 100, 0).decode(), refused(open, 'made'), flush=True)
    os._exit(0)
os.read(ours, 1)
if KILLED == 'before': os.kill(DAEMON, 9)
os.chown('made', 0, 0); os.chmod('made', 0)
if KILLED == 'after': os.kill(DAEMON, 9)
os.write(to_them, b'x'); os.wait()
print(owner('made'), open('made').read())
"#;
        let script = format!("DAEMON, KILLED = {}, '{killed}'\n{script}", node.daemon());
        let Some(found) = words(&node, &script) else { return };
        assert_eq!(found, "before after child EACCES 0:0 before after child", "killed {killed}");
        let status = node.hearth(&["status", "--json"]).expect_success();
        assert!(status.contains("\"forced_ends\": []"), "{status}");
    }
}

/// A file that is inherited open for reading gives no right to write; the same file opened for writing does, whatever its mode
/// is later.
#[test]
fn a_child_that_opens_an_inherited_file_for_writing_may_write_it_from_then_on() {
    let node = Node::up();
    let found = words(
        &node,
        r#"
def turn(read, write): os.write(write, b'x'); os.read(read, 1)
os.chdir(T); put('file', 'old', 0o666)
ours, to_us = os.pipe(); theirs, to_them = os.pipe()
if os.fork() == 0:
    become(12345)
    inherited = os.open('file', os.O_RDONLY)
    if os.fork() == 0:
        os.pread(inherited, 3, 0)
        mine = os.open('file', os.O_WRONLY)
        turn(theirs, to_us)
        os.pwrite(mine, b'new', 0); os.fsync(mine)
        os._exit(0)
    os.wait(); os._exit(0)
os.read(ours, 1)
os.chmod('file', 0o600)
os.write(to_them, b'x'); os.wait()
print(open('file').read())
"#,
    );
    let Some(found) = found else { return };
    assert_eq!(found, "new");
    let status = node.hearth(&["status", "--json"]).expect_success();
    assert!(status.contains("\"forced_ends\": []"), "{status}");
}

/// As many as the kernel allows to a process, and by each what its members may.
#[test]
fn a_user_of_many_groups_has_them_all() {
    let node = Node::up();
    let found = words(
        &node,
        r#"
os.chmod(T, 0o777)
for group in (1, 1500, 70000, 65536 + 1):
    name = T + '/of%d' % group
    put(name, 'theirs', 0o640)
    os.chown(name, 0, group)
for last in (3000, 65536 + 1):
    child = os.fork()
    if child == 0:
        os.setgroups(range(2, last + 1))
        os.setgid(12345); os.setuid(12345)
        for group in (1, 1500, 70000, 65536 + 1):
            print(refused(open, T + '/of%d' % group), refused(open, T + '/of%d' % group, 'r+'))
        sys.stdout.flush(); os._exit(0)
    os.waitpid(child, 0)
"#,
    );
    let Some(found) = found else { return };
    let (no, read) = ("EACCES EACCES", "done EACCES");
    assert_eq!(found, [no, read, no, no, no, read, no, read].join(" "));
}

/// A user's program that finds the memory in which offsets are shared.
const EVIL: &str = r#"
EVIL = '''
import ctypes
def places():
    for line in open("/proc/self/maps"):
        if "hearth-openings" in line:
            start, end = (int(address, 16) for address in line.split()[0].split("-"))
            yield from range(start, end, 32)
def tear():
    found = [place for place in places() if ctypes.c_uint32.from_address(place).value]
    moved = [ctypes.c_uint64.from_address(place + 8).value for place in found]
    for place in places():
        ctypes.c_uint64.from_address(place + 8).value = 0
        ctypes.c_uint32.from_address(place + 16).value = 1
    return sorted(moved)
'''
import ctypes, mmap, signal
exec(EVIL)
SHOW = ['python3', '-c', EVIL + 'print(*tear(), flush=True)']
code = mmap.mmap(-1, 4096, prot=7)
# mov eax, edi; mov edi, esi; mov edx, esi; syscall; ret: setresuid that nobody sees.
code.write(bytes.fromhex('89f889f789f20f05c3'))
unseen = ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_int, ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
def child(act):
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try: act()
        finally: os._exit(1)
    os.waitpid(pid, 0)
def spawn(user):
    os.dup2(given.fileno(), 0); user(); os.execvp(SHOW[0], SHOW)
"#;

#[test]
fn what_another_user_does_to_shared_memory_moves_nobodys_offset() {
    let node = Node::up();
    let script = r#"
os.chmod(T, 0o777)
log = os.open(T + '/rootlog', os.O_RDWR | os.O_CREAT, 0o600)
given = open(T + '/given', 'w+'); given.write('12345'); given.flush()
count = 0
def check():
    # On the offset that the process has in fact, which a hang or a fall back would show.
    global count
    os.write(log, b'%d\n' % count); count += 1
    sys.stdout.flush()
    if os.pread(log, 99, 0) != b''.join(b'%d\n' % index for index in range(count)): sys.exit('overwritten')
check()
subprocess.run(['setpriv', '--reuid', '65534', '--regid', '65534', '--clear-groups'] + SHOW, stdin=given, check=True)
check()
subprocess.run(SHOW, stdin=given, user=65534, check=True)
check()
child(lambda: spawn(lambda: become(65534)))
check()
child(lambda: spawn(lambda: unseen(117, 65534)))
check()
# Who can go back until the exec, not after it; also on its parent's memory, without a fork.
child(lambda: spawn(lambda: os.setresuid(65534, 65534, 0)))
check()
def act():
    os.setresuid(65534, 0, 0); os.dup2(given.fileno(), 0)
    os.waitpid(os.posix_spawnp(SHOW[0], SHOW, os.environ, resetids=True), 0); os._exit(0)
child(act)
check()
# Without an exec, with what it has open itself, from where it is on.
def act():
    become(65534)
    os.write(log, b'by nobody')
    print(os.lseek(log, 0, os.SEEK_CUR), flush=True)
    tear(); os._exit(0)
child(act)
os.ftruncate(log, os.lseek(log, 0, os.SEEK_CUR))
check()
"#;
    let found = words(&node, &format!("{EVIL}{script}"));
    let Some(found) = found else { return };
    // The file that it was given is at 5; it saw its other open files before it became that user.
    assert_eq!(found, "5 4 5 5 6 5 8 5 10 5 23");
}

#[test]
fn who_can_go_back_shares_its_offsets_all_the_time() {
    let node = Node::up();
    let script = r#"
os.chmod(T, 0o777)
log = os.open(T + '/log', os.O_RDWR | os.O_CREAT)
os.write(log, b'a')
def act():
    os.seteuid(1000); os.write(log, b'b'); os.stat(T); os.seteuid(0); os.write(log, b'c'); os._exit(0)
child(act)
os.write(log, b'd'); os.seteuid(1000)
child(lambda: (os.write(log, b'e'), os._exit(0)))
os.seteuid(0); os.write(log, b'f')
# Once it is another one, it shares them with its own children, and over an exec.
def act():
    become(1000)
    os.write(log, b'g')
    child(lambda: (os.write(log, b'h'), os._exit(0)))
    os.dup2(log, 1); os.execvp('sh', ['sh', '-c', 'printf i; (printf j); /usr/bin/printf k'])
child(act)
print(os.pread(log, 99, 0).decode(), os.lseek(log, 0, os.SEEK_CUR))
"#;
    let found = words(&node, &format!("{EVIL}{script}"));
    let Some(found) = found else { return };
    assert_eq!(found, "abcdefghijk 6");
}

#[test]
fn a_set_user_id_program_is_handed_no_memory() {
    let node = Node::up();
    let script = r#"
import shutil, tempfile
os.chmod(T, 0o777)
with tempfile.TemporaryDirectory(dir='/var/tmp') as folder:
    os.chmod(folder, 0o755)
    program = folder + '/find'
    shutil.copy(shutil.which('find'), program); os.chmod(program, 0o4755)
    def act():
        become(65534)
        os.dup2(os.open(T + '/mine', os.O_RDWR | os.O_CREAT), 0)
        os.execv(program, ['find', '/proc/self/fd/', '-lname', '*hearth-*', '-printf', '%l '])
    child(act)
print('done')
"#;
    let found = words(&node, &format!("{EVIL}{script}"));
    let Some(found) = found else { return };
    assert_eq!(found, "done");
}

/// Users who may not ask how the nodes are, have to be told which of them to use all the same.
#[test]
fn a_program_of_another_user_runs_at_the_node_that_leads_and_waits_for_it() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: needs root");
        return;
    }
    let node = Node::of_nodes_with(2, 1000, 500);
    std::fs::set_permissions(node.dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let program = node.program();
    let as_user = |command: &str, rest: &[&str]| {
        let user = ["setpriv", "--reuid", "12345", "--regid", "12345", "--clear-groups"];
        limited(&[&user[..], &[&program, command, "--dir", node.dir()]].concat(), rest)
    };
    as_user("run", &["--node", "2", "--", "true"]).expect_failure("node 1 leads, not node 2");
    let told = as_user("status", &[]);
    assert_eq!(told.status.code(), Some(3));
    let told = String::from_utf8(told.stdout).unwrap();
    assert!(told.contains("only the node's user and root may"), "{told}");
    assert!(
        told.contains("it leads") && told.contains("it follows node 1") && !told.contains("pool"),
        "{told}"
    );
    node.hearth(&["down", "--node", "1", "--hard"]).expect_success();
    // The next node does not lead yet.
    for named in [&["--node", "2"][..], &[]] {
        let script = ["--", "sh", "-c", "echo $HEARTH_TREE; ls -d $HEARTH_TREE"];
        let told = as_user("run", &[named, &script].concat()).expect_success();
        let tree = format!("{}/n2\n", node.dir());
        assert_eq!(told, tree.repeat(2));
    }
    node.hearth(&["down", "--hard"]).expect_success();
    as_user("run", &["--", "true"]).expect_failure("no node leads now");
}
