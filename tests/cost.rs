//! The cost of calls for a program, through the C library and all layers below. A write: no system call, no allocation,
//! one fence, and of the update log its bytes with a header, rounded up to lines. Opening, mapping and closing a file:
//! the system calls that need the kernel's descriptor and memory. Never time.

#![allow(clippy::unwrap_used, reason = "a test ends where something unexpected is")]

mod harness;

use harness::{Expect, Node, limited};
use std::process::Output;

/// After the first writes the kernel kills it at any system call but read, write and exit (seccomp's strict mode); those
/// two fail for a file of the tree, which stands for no file of the kernel's. It prints allocations of the library,
/// fences and bytes of the log.
const PROGRAM: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/seccomp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

static char bytes[1 << 16];
/* So many blocks are written first: the memory of the log that is mapped by then lasts for the rest. */
enum { FIRST = 66 };

static void end(int code) { syscall(SYS_exit, code); }

int main(int argc, char **argv) {
    int size = atoi(argv[2]), warm = atoi(argv[3]), rounds = atoi(argv[4]);
    int fd = open(argv[1], O_RDWR | O_CREAT, 0644);
    void (*costs)(unsigned long *) = (void (*)(unsigned long *))dlsym(RTLD_DEFAULT, "hearth_costs");
    if (fd < 0 || !costs) return 10;
    memset(bytes, 'x', sizeof bytes);
    for (int first = 0; first < FIRST; first++)
        if (pwrite(fd, bytes, 4096, 0) != 4096) return 12;
    unsigned long before[3], after[3];
    for (int round = -warm; round < rounds; round++) {
        if (round == 0) {
            costs(before);
            if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT)) return 11;
            if (argc > 5) open(argv[5], O_RDWR | O_CREAT, 0644);
        }
        off_t at = (round & 15) * size;
        if (round & 1) {
            if (pwrite(fd, bytes, size, at) != size) end(12);
        } else if (lseek(fd, at, SEEK_SET) != at || write(fd, bytes, size) != size) {
            end(13);
        }
        if (pread(fd, bytes, size, at) != size) end(14);
    }
    costs(after);
    char line[100];
    int length = snprintf(line, sizeof line, "%lu %lu %lu\n", after[0] - before[0], after[1] - before[1], after[2] - before[2]);
    end(write(1, line, length) != length);
}
"#;

/// After the first rounds the kernel kills it at any system call but those that a descriptor and a mapping need. It opens,
/// reads, maps for reading, unmaps and closes a file, and links and unlinks another name.
const OPENS: &str = r#"
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#define ALLOW(number) \
    BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 1), BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)

static struct sock_filter allowed[] = {
    BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
    ALLOW(SYS_fcntl), ALLOW(SYS_close), ALLOW(SYS_mmap), ALLOW(SYS_mprotect), ALLOW(SYS_munmap), ALLOW(SYS_exit),
    BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
};

int main(int argc, char **argv) {
    static char bytes[5000], other[4000];
    snprintf(other, sizeof other, "%s-link", argv[1]);
    int first = open(other, O_RDWR | O_CREAT, 0644);
    for (int written = 0; written < 66; written++)
        if (pwrite(first, bytes, 4096, 0) != 4096) return 10;
    if (first < 0 || close(first) || unlink(other)) return 10;
    for (int round = 0; round < 20; round++) {
        if (round == 10) {
            struct sock_fprog program = {sizeof allowed / sizeof *allowed, allowed};
            if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program)) return 11;
            if (argc > 2) getppid();
        }
        int fd = open(argv[1], O_RDWR | O_CREAT, 0644);
        if (fd < 0 || pwrite(fd, bytes, sizeof bytes, 0) != sizeof bytes) return 12;
        char *map = mmap(0, sizeof bytes, PROT_READ, MAP_PRIVATE, fd, 0);
        if (map == MAP_FAILED || munmap(map, sizeof bytes) || close(fd)) return 13;
        if (link(argv[1], other) || unlink(other)) return 14;
    }
    syscall(SYS_exit, 0);
}
"#;

/// Compiles a program in the node's folder, and runs it on the node's tree.
fn run(node: &Node, text: &str, arguments: &[&str]) -> Output {
    let (source, program) = (format!("{}/steady.c", node.dir()), format!("{}/steady", node.dir()));
    std::fs::write(&source, text).unwrap();
    limited(&["cc"], &["-O1", "-o", &program, &source, "-ldl"]).expect_success();
    let file = node.path("file");
    node.hearth(&[&["run", "--", &program, &file][..], arguments].concat())
}

#[test]
fn a_write_in_steady_state_is_one_fence_and_neither_call_nor_allocation() {
    let node = Node::up();
    // The first writes use up the room that a new session has, and ask for more, and for more memory of the log; all together
    // fill less than half of it.
    for (bytes, warm, rounds, line) in [
        ("1", "400", "400", "0 400 51200\n"),
        ("128", "400", "400", "0 400 76800\n"),
        ("129", "400", "400", "0 400 102400\n"),
        ("4096", "10", "40", "0 40 166400\n"),
    ] {
        let told = run(&node, PROGRAM, &[bytes, warm, rounds]).expect_success();
        assert_eq!(told, line, "{rounds} writes of {bytes} bytes");
    }
    assert_eq!(node.sh("wc -c < $T/file").expect_success(), "65536\n");
}

#[test]
fn a_call_that_the_kernel_sees_would_be_noticed() {
    let node = Node::up();
    let killed = run(&node, PROGRAM, &["128", "32", "10", &node.path("other")]);
    assert!(!killed.status.success() && killed.stdout.is_empty(), "{killed:?}");
}

#[test]
fn opening_mapping_and_closing_a_file_needs_no_other_system_calls_than_its_descriptor_and_memory() {
    let node = Node::up();
    run(&node, OPENS, &[]).expect_success();
    let killed = run(&node, OPENS, &["and one more call"]);
    assert!(!killed.status.success(), "a further call would be noticed: {killed:?}");
}
