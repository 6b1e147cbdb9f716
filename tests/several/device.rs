//! The device below the pool of a node, for a daemon that is started with a library that stands for it: each sync of a file does
//! what a file says.

use super::cluster::Chain;
use crate::harness::{Expect, limited};

/// The file says `fails`: each sync is an error. `hangs`: none returns before the file says something else, or is gone. `slow`:
/// each takes 600 ms.
const LIBRARY: &str = "
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>
static char now(void) {
    const char *path = getenv(\"HEARTH_TEST_DEVICE\");
    int file = path ? syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC) : -1;
    char first = 0;
    if (file < 0) return 0;
    if (syscall(SYS_read, file, &first, 1) != 1) first = 0;
    syscall(SYS_close, file);
    return first;
}
static int go(long call, int fd) {
    if (now() == 's') usleep(600000);
    while (now() == 'h') usleep(2000);
    if (now() == 'f') { errno = EIO; return -1; }
    return syscall(call, fd);
}
int fsync(int fd) { return go(SYS_fsync, fd); }
int fdatasync(int fd) { return go(SYS_fdatasync, fd); }
";

/// The command that starts another one with such a device, which a file controls.
pub fn device_variables(dir: &str, file: &str) -> [String; 3] {
    let [source, library] = ["c", "so"].map(|end| format!("{dir}/device.{end}"));
    if !std::path::Path::new(&library).exists() {
        std::fs::write(&source, LIBRARY).unwrap();
        limited(&["cc", "-shared", "-fPIC", "-o", &library], &[&source]).expect_success();
    }
    ["env".to_owned(), format!("LD_PRELOAD={library}"), format!("HEARTH_TEST_DEVICE={file}")]
}

impl Chain {
    fn device(&self, node: u32) -> String {
        format!("{}/node-{node}.device", self.dir())
    }

    /// Lets the daemon of a node find a device that can fail, and waits until all nodes are in sync again.
    pub fn give_device(&self, node: u32) {
        self.end(node);
        let program =
            [env!("CARGO_BIN_EXE_hearth"), "start", "--dir", self.dir(), "--node", &node.to_string()];
        let variables = device_variables(self.dir(), &self.device(node));
        let variables: Vec<&str> = variables.iter().map(String::as_str).collect();
        limited(&variables, &program).expect_success();
        self.until_whole();
    }

    /// The device of a node does this from now on.
    pub fn set_device(&self, node: u32, does: &str) {
        // At once: a file that is being written is empty for a moment.
        let new = format!("{}.new", self.device(node));
        std::fs::write(&new, does).unwrap();
        std::fs::rename(new, self.device(node)).unwrap();
    }

    /// The device of a node is sound again.
    pub fn mend_device(&self, node: u32) {
        std::fs::remove_file(self.device(node)).unwrap();
    }
}
