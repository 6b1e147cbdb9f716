//! How a mount is made.

/// How a mount is made; the default serves every user of the machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// What `mount` and `df` show as the source.
    pub name: String,
    /// Users other than who mounts may use it. Who is not root needs `user_allow_other` in `/etc/fuse.conf` for it.
    pub other_users: bool,
    /// The kernel checks permissions too, before the engine does: with fresh attributes, which it asks for at each
    /// component of a path. Only so are named pipes and sockets protected, which it opens without asking us.
    pub kernel_checks: bool,
    /// Set-id bits count when a program on the mount is run.
    pub set_ids: bool,
    /// Devices on the mount can be opened.
    pub devices: bool,
    /// Threads that serve; as many requests as that are under way at once, beside those that wait for locks.
    pub threads: usize,
    /// Threads that may come to serve, if all of them do.
    pub threads_max: usize,
    /// Most bytes that one request reads or writes; larger ones are cut by the kernel. A power of two, at least a page.
    pub message_bytes_max: u32,
    /// Requests that wait for locks; each has a thread.
    pub waits_max: usize,
    /// Inodes that the kernel may know before it is asked to forget some, if it can be (Linux 6.18).
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
