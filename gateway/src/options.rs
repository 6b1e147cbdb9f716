//! Options of a mount.

/// Options of a mount; the default serves every user of the machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// The source that `mount` and `df` show.
    pub name: String,
    /// Users other than the one who mounts may use it. If that user is not root, `user_allow_other` has to be in
    /// `/etc/fuse.conf`.
    pub other_users: bool,
    /// The kernel checks permissions too, before the engine does, with fresh attributes, which it requests at each
    /// component of a path. Only this protects named pipes and sockets, which the kernel opens without a message to the
    /// gateway.
    pub kernel_checks: bool,
    /// Set-id bits of programs on the mount take effect.
    pub set_ids: bool,
    /// Devices on the mount can be opened.
    pub devices: bool,
    /// Serving threads, and so the number of concurrent requests, apart from those that wait for locks.
    pub threads: usize,
    /// Limit of serving threads, which grow if all of them are busy.
    pub threads_max: usize,
    /// Limit of bytes that one request reads or writes; the kernel splits larger ones. A power of two, at least a page.
    pub message_bytes_max: u32,
    /// Limit of requests that wait for locks; each has a thread.
    pub waits_max: usize,
    /// Limit of inodes that the kernel knows; beyond it the kernel is asked to forget some, if it supports that (Linux
    /// 6.18).
    pub inodes_max: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            name: "hearth".to_string(),
            other_users: true,
            kernel_checks: true,
            set_ids: false,
            devices: false,
            threads: 8,
            threads_max: 24,
            message_bytes_max: 1 << 20,
            waits_max: 1024,
            inodes_max: 1 << 16,
        }
    }
}
