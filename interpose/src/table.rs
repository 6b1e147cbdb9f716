//! Every system call of x86-64, and its treatment when it concerns a file of ours: a function that serves or refuses
//! it, or a reason why it cannot concern one. A test compares the table with the kernel's numbers.

use crate::calls::{
    copies, data, directory, maps, names, numbers, opens, process, refused, rings, special, status, waits,
};
use crate::dispatch::{Answer, Call};
use crate::walk::End;

/// The position of a path in the arguments of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathArgument {
    /// Argument with the directory descriptor that a relative path starts from.
    pub dir: Option<u8>,
    /// Argument with the path.
    pub path: u8,
    /// A symbolic link at the path's end is followed. Calls that decide this by a flag change the field themselves.
    pub follow: bool,
    /// Argument with flags of `open`, of which `O_NOFOLLOW` leaves the link at the path's end unfollowed.
    pub open_flags: Option<u8>,
    /// An empty path can stand for the descriptor itself. Calls with `AT_EMPTY_PATH` check that flag.
    pub empty: bool,
    /// A null pointer counts as an empty path.
    pub null: bool,
    /// A path of a call that makes a name.
    pub makes: bool,
    /// The call is about the name at the path's end, also if slashes follow it.
    pub entry: bool,
}

/// A path that starts from the root or from the working directory.
pub const fn path(path: u8) -> PathArgument {
    PathArgument {
        dir: None,
        path,
        follow: true,
        open_flags: None,
        empty: false,
        null: false,
        makes: false,
        entry: false,
    }
}

/// A path that can start from a directory descriptor.
pub const fn at(dir: u8, file: u8) -> PathArgument {
    PathArgument { dir: Some(dir), ..path(file) }
}

impl PathArgument {
    /// The same for a call on the link itself.
    pub const fn itself(self) -> Self {
        Self { follow: false, ..self }
    }

    /// The same in a call that makes, removes or renames the name itself.
    pub const fn entry(self) -> Self {
        Self { entry: true, ..self.itself() }
    }

    const fn or_file(self) -> Self {
        Self { empty: true, ..self }
    }

    /// The same if a null pointer counts as an empty path.
    pub const fn or_null(self) -> Self {
        Self { null: true, ..self }
    }

    const fn opened_by(self, open_flags: u8) -> Self {
        Self { open_flags: Some(open_flags), ..self }
    }

    /// The same in a call that makes a name.
    pub const fn makes(self) -> Self {
        Self { makes: true, ..self }
    }

    /// How a walk treats the end of the path.
    pub fn end(self) -> End {
        match (self.entry, self.follow) {
            (true, _) => End::Entry,
            (false, true) => End::Follow,
            (false, false) => End::Itself,
        }
    }

    /// The same for a call of which only the table is known, and its flags of `open`.
    pub fn end_in(self, call: &Call) -> End {
        let flags = self.open_flags.map_or(0, |argument| call.int(usize::from(argument)));
        Self { follow: self.follow && flags & libc::O_NOFOLLOW == 0, ..self }.end()
    }
}

/// A function that serves a call.
pub type Function = fn(&Call) -> Answer;

/// The treatment of a call.
#[derive(Clone, Copy)]
pub enum Treatment {
    /// It goes to the kernel; the text says why that is always right.
    Passes(#[allow(dead_code, reason = "for the reader and the test")] &'static str),
    /// It concerns us if this argument is a descriptor of ours.
    File(u8, Function),
    /// It concerns us if one of these arguments is.
    Files(u8, u8, Function),
    /// It concerns us if one of these paths is.
    Paths(&'static [PathArgument], Function),
    /// It concerns us while a file of ours is mapped shared.
    Memory(Function),
    /// Its function decides.
    Always(Function),
}

use Treatment::{Always, File, Files, Memory, Passes, Paths};

/// A system call.
pub struct Row {
    /// Its number on x86-64.
    pub number: usize,
    /// Its name in the kernel.
    pub name: &'static str,
    /// Its treatment.
    pub treatment: Treatment,
}

const fn row(number: usize, name: &'static str, treatment: Treatment) -> Row {
    Row { number, name, treatment }
}

const MEMORY: &str =
    "it is about memory; mappings of our files are ordinary memory, or the kernel's of the mount";
const SIGNALS: &str = "it is about signals; only handlers are wrapped";
const TIME: &str = "it is about clocks";
const PROCESSES: &str =
    "it is about processes and threads; what makes them is seen where it is called (`patch`)";
const IDENTITY: &str = "the kernel keeps the credentials; the mount does not follow setfsuid and capset";
const MAKES: &str = "it makes a descriptor that is not a file";
const OTHER_FILES: &str =
    "its descriptors are not files; one of ours inside its arguments is refused as EBADF";
const SYSTEM: &str = "it is about the machine; a path in it that is ours is not found";
const ABSENT: &str = "the kernel answers ENOSYS";

/// The table, by number.
#[rustfmt::skip]
pub static ROWS: &[Row] = &[
    row(0, "read", File(0, data::read)),
    row(1, "write", File(0, data::write)),
    row(2, "open", Paths(const { &[path(0).opened_by(1)] }, opens::open)),
    row(3, "close", File(0, numbers::close)),
    row(4, "stat", Paths(const { &[path(0)] }, status::stat)),
    row(5, "fstat", File(0, status::fstat)),
    row(6, "lstat", Paths(const { &[path(0).itself()] }, status::lstat)),
    row(7, "poll", Always(waits::poll)),
    row(8, "lseek", File(0, data::lseek)),
    row(9, "mmap", File(4, maps::mmap)),
    row(10, "mprotect", Always(process::protect)),
    row(11, "munmap", Memory(maps::munmap)),
    row(12, "brk", Passes(MEMORY)),
    row(13, "rt_sigaction", Always(process::rt_sigaction)),
    row(14, "rt_sigprocmask", Passes(SIGNALS)),
    row(15, "rt_sigreturn", Passes(SIGNALS)),
    row(16, "ioctl", File(0, numbers::ioctl)),
    row(17, "pread64", File(0, data::pread64)),
    row(18, "pwrite64", File(0, data::pwrite64)),
    row(19, "readv", File(0, data::readv)),
    row(20, "writev", File(0, data::writev)),
    row(21, "access", Paths(const { &[path(0)] }, status::access)),
    row(22, "pipe", Passes(MAKES)),
    row(23, "select", Always(waits::select)),
    row(24, "sched_yield", Passes(PROCESSES)),
    row(25, "mremap", Memory(maps::mremap)),
    row(26, "msync", Memory(maps::msync)),
    row(27, "mincore", Passes(MEMORY)),
    row(28, "madvise", Passes(MEMORY)),
    row(29, "shmget", Passes(MEMORY)),
    row(30, "shmat", Passes(MEMORY)),
    row(31, "shmctl", Passes(MEMORY)),
    row(32, "dup", File(0, numbers::dup)),
    row(33, "dup2", Files(0, 1, numbers::dup2)),
    row(34, "pause", Passes(SIGNALS)),
    row(35, "nanosleep", Passes(TIME)),
    row(36, "getitimer", Passes(TIME)),
    row(37, "alarm", Passes(TIME)),
    row(38, "setitimer", Passes(TIME)),
    row(39, "getpid", Passes(PROCESSES)),
    row(40, "sendfile", Files(0, 1, copies::sendfile)),
    row(41, "socket", Passes(MAKES)),
    row(42, "connect", Always(special::name_socket)),
    row(43, "accept", File(0, refused::not_a_socket)),
    row(44, "sendto", File(0, refused::not_a_socket)),
    row(45, "recvfrom", File(0, refused::not_a_socket)),
    row(46, "sendmsg", File(0, refused::not_a_socket)),
    row(47, "recvmsg", File(0, refused::not_a_socket)),
    row(48, "shutdown", File(0, refused::not_a_socket)),
    row(49, "bind", Always(special::name_socket)),
    row(50, "listen", File(0, refused::not_a_socket)),
    row(51, "getsockname", File(0, refused::not_a_socket)),
    row(52, "getpeername", File(0, refused::not_a_socket)),
    row(53, "socketpair", Passes(MAKES)),
    row(54, "setsockopt", File(0, refused::not_a_socket)),
    row(55, "getsockopt", File(0, refused::not_a_socket)),
    row(56, "clone", Passes(PROCESSES)),
    row(57, "fork", Passes(PROCESSES)),
    row(58, "vfork", Passes(PROCESSES)),
    row(59, "execve", Always(process::execve)),
    row(60, "exit", Passes(PROCESSES)),
    row(61, "wait4", Passes(PROCESSES)),
    row(62, "kill", Passes(SIGNALS)),
    row(63, "uname", Passes(PROCESSES)),
    row(64, "semget", Passes(OTHER_FILES)),
    row(65, "semop", Passes(OTHER_FILES)),
    row(66, "semctl", Passes(OTHER_FILES)),
    row(67, "shmdt", Passes(MEMORY)),
    row(68, "msgget", Passes(OTHER_FILES)),
    row(69, "msgsnd", Passes(OTHER_FILES)),
    row(70, "msgrcv", Passes(OTHER_FILES)),
    row(71, "msgctl", Passes(OTHER_FILES)),
    row(72, "fcntl", File(0, numbers::fcntl)),
    row(73, "flock", File(0, numbers::flock)),
    row(74, "fsync", File(0, data::fsync)),
    row(75, "fdatasync", File(0, data::fdatasync)),
    row(76, "truncate", Paths(const { &[path(0)] }, status::truncate)),
    row(77, "ftruncate", File(0, data::ftruncate)),
    row(78, "getdents", File(0, refused::getdents)),
    row(79, "getcwd", Always(directory::getcwd)),
    row(80, "chdir", Always(directory::chdir)),
    row(81, "fchdir", Always(directory::fchdir)),
    row(82, "rename", Paths(const { &[path(0).entry().makes(), path(1).entry().makes()] }, names::rename)),
    row(83, "mkdir", Paths(const { &[path(0).entry().makes()] }, names::mkdir)),
    row(84, "rmdir", Paths(const { &[path(0).entry()] }, names::rmdir)),
    row(85, "creat", Paths(const { &[path(0)] }, opens::creat)),
    row(86, "link", Paths(const { &[path(0).itself().makes(), path(1).entry().makes()] }, names::link)),
    row(87, "unlink", Paths(const { &[path(0).entry()] }, names::unlink)),
    row(88, "symlink", Paths(const { &[path(1).entry().makes()] }, names::symlink)),
    row(89, "readlink", Paths(const { &[path(0).itself()] }, names::readlink)),
    row(90, "chmod", Paths(const { &[path(0)] }, status::chmod)),
    row(91, "fchmod", File(0, status::fchmod)),
    row(92, "chown", Paths(const { &[path(0)] }, status::chown)),
    row(93, "fchown", File(0, status::fchown)),
    row(94, "lchown", Paths(const { &[path(0).itself()] }, status::lchown)),
    row(95, "umask", Always(process::umask)),
    row(96, "gettimeofday", Passes(TIME)),
    row(97, "getrlimit", Passes(PROCESSES)),
    row(98, "getrusage", Passes(PROCESSES)),
    row(99, "sysinfo", Passes(PROCESSES)),
    row(100, "times", Passes(PROCESSES)),
    row(101, "ptrace", Passes(PROCESSES)),
    row(102, "getuid", Passes(IDENTITY)),
    row(103, "syslog", Passes(SYSTEM)),
    row(104, "getgid", Passes(IDENTITY)),
    row(105, "setuid", Always(process::set_user)),
    row(106, "setgid", Always(process::set_user)),
    row(107, "geteuid", Passes(IDENTITY)),
    row(108, "getegid", Passes(IDENTITY)),
    row(109, "setpgid", Passes(PROCESSES)),
    row(110, "getppid", Passes(PROCESSES)),
    row(111, "getpgrp", Passes(PROCESSES)),
    row(112, "setsid", Passes(PROCESSES)),
    row(113, "setreuid", Always(process::set_user)),
    row(114, "setregid", Always(process::set_user)),
    row(115, "getgroups", Passes(IDENTITY)),
    row(116, "setgroups", Always(process::set_user)),
    row(117, "setresuid", Always(process::set_user)),
    row(118, "getresuid", Passes(IDENTITY)),
    row(119, "setresgid", Always(process::set_user)),
    row(120, "getresgid", Passes(IDENTITY)),
    row(121, "getpgid", Passes(PROCESSES)),
    row(122, "setfsuid", Passes(IDENTITY)),
    row(123, "setfsgid", Passes(IDENTITY)),
    row(124, "getsid", Passes(PROCESSES)),
    row(125, "capget", Passes(IDENTITY)),
    row(126, "capset", Passes(IDENTITY)),
    row(127, "rt_sigpending", Passes(SIGNALS)),
    row(128, "rt_sigtimedwait", Passes(SIGNALS)),
    row(129, "rt_sigqueueinfo", Passes(SIGNALS)),
    row(130, "rt_sigsuspend", Passes(SIGNALS)),
    row(131, "sigaltstack", Passes(SIGNALS)),
    row(132, "utime", Paths(const { &[path(0)] }, status::utime)),
    row(133, "mknod", Paths(const { &[path(0).entry().makes()] }, names::mknod)),
    row(134, "uselib", Passes(ABSENT)),
    row(135, "personality", Passes(PROCESSES)),
    row(136, "ustat", Passes(SYSTEM)),
    row(137, "statfs", Paths(const { &[path(0)] }, status::statfs)),
    row(138, "fstatfs", File(0, status::fstatfs)),
    row(139, "sysfs", Passes(SYSTEM)),
    row(140, "getpriority", Passes(PROCESSES)),
    row(141, "setpriority", Passes(PROCESSES)),
    row(142, "sched_setparam", Passes(PROCESSES)),
    row(143, "sched_getparam", Passes(PROCESSES)),
    row(144, "sched_setscheduler", Passes(PROCESSES)),
    row(145, "sched_getscheduler", Passes(PROCESSES)),
    row(146, "sched_get_priority_max", Passes(PROCESSES)),
    row(147, "sched_get_priority_min", Passes(PROCESSES)),
    row(148, "sched_rr_get_interval", Passes(PROCESSES)),
    row(149, "mlock", Passes(MEMORY)),
    row(150, "munlock", Passes(MEMORY)),
    row(151, "mlockall", Passes(MEMORY)),
    row(152, "munlockall", Passes(MEMORY)),
    row(153, "vhangup", Passes(SYSTEM)),
    row(154, "modify_ldt", Passes(PROCESSES)),
    row(155, "pivot_root", Paths(const { &[path(0), path(1)] }, refused::invalid)),
    row(156, "_sysctl", Passes(SYSTEM)),
    row(157, "prctl", Passes(PROCESSES)),
    row(158, "arch_prctl", Passes(PROCESSES)),
    row(159, "adjtimex", Passes(TIME)),
    row(160, "setrlimit", Always(process::set_limit)),
    row(161, "chroot", Always(directory::chroot)),
    row(162, "sync", Always(data::sync)),
    row(163, "acct", Paths(const { &[path(0)] }, refused::not_permitted)),
    row(164, "settimeofday", Passes(TIME)),
    row(165, "mount", Paths(const { &[path(1)] }, refused::invalid)),
    row(166, "umount2", Paths(const { &[path(0)] }, refused::invalid)),
    row(167, "swapon", Paths(const { &[path(0)] }, refused::invalid)),
    row(168, "swapoff", Paths(const { &[path(0)] }, refused::invalid)),
    row(169, "reboot", Passes(SYSTEM)),
    row(170, "sethostname", Passes(SYSTEM)),
    row(171, "setdomainname", Passes(SYSTEM)),
    row(172, "iopl", Passes(SYSTEM)),
    row(173, "ioperm", Passes(SYSTEM)),
    row(174, "create_module", Passes(ABSENT)),
    row(175, "init_module", Passes(SYSTEM)),
    row(176, "delete_module", Passes(SYSTEM)),
    row(177, "get_kernel_syms", Passes(ABSENT)),
    row(178, "query_module", Passes(ABSENT)),
    row(179, "quotactl", Paths(const { &[path(1)] }, refused::no_block_device)),
    row(180, "nfsservctl", Passes(ABSENT)),
    row(181, "getpmsg", Passes(ABSENT)),
    row(182, "putpmsg", Passes(ABSENT)),
    row(183, "afs_syscall", Passes(ABSENT)),
    row(184, "tuxcall", Passes(ABSENT)),
    row(185, "security", Passes(ABSENT)),
    row(186, "gettid", Passes(PROCESSES)),
    row(187, "readahead", File(0, data::readahead)),
    row(188, "setxattr", Paths(const { &[path(0)] }, status::setxattr)),
    row(189, "lsetxattr", Paths(const { &[path(0).itself()] }, status::lsetxattr)),
    row(190, "fsetxattr", File(0, status::fsetxattr)),
    row(191, "getxattr", Paths(const { &[path(0)] }, status::getxattr)),
    row(192, "lgetxattr", Paths(const { &[path(0).itself()] }, status::lgetxattr)),
    row(193, "fgetxattr", File(0, status::fgetxattr)),
    row(194, "listxattr", Paths(const { &[path(0)] }, status::listxattr)),
    row(195, "llistxattr", Paths(const { &[path(0).itself()] }, status::llistxattr)),
    row(196, "flistxattr", File(0, status::flistxattr)),
    row(197, "removexattr", Paths(const { &[path(0)] }, status::removexattr)),
    row(198, "lremovexattr", Paths(const { &[path(0).itself()] }, status::lremovexattr)),
    row(199, "fremovexattr", File(0, status::fremovexattr)),
    row(200, "tkill", Passes(SIGNALS)),
    row(201, "time", Passes(TIME)),
    row(202, "futex", Passes(PROCESSES)),
    row(203, "sched_setaffinity", Passes(PROCESSES)),
    row(204, "sched_getaffinity", Passes(PROCESSES)),
    row(205, "set_thread_area", Passes(PROCESSES)),
    row(206, "io_setup", Always(rings::io_setup)),
    row(207, "io_destroy", Passes(OTHER_FILES)),
    row(208, "io_getevents", Passes(OTHER_FILES)),
    row(209, "io_submit", Passes(OTHER_FILES)),
    row(210, "io_cancel", Passes(OTHER_FILES)),
    row(211, "get_thread_area", Passes(PROCESSES)),
    row(212, "lookup_dcookie", Passes(SYSTEM)),
    row(213, "epoll_create", Passes(MAKES)),
    row(214, "epoll_ctl_old", Passes(OTHER_FILES)),
    row(215, "epoll_wait_old", Passes(OTHER_FILES)),
    row(216, "remap_file_pages", Passes(MEMORY)),
    row(217, "getdents64", File(0, data::getdents64)),
    row(218, "set_tid_address", Passes(PROCESSES)),
    row(219, "restart_syscall", Passes(PROCESSES)),
    row(220, "semtimedop", Passes(OTHER_FILES)),
    row(221, "fadvise64", File(0, data::fadvise64)),
    row(222, "timer_create", Passes(TIME)),
    row(223, "timer_settime", Passes(TIME)),
    row(224, "timer_gettime", Passes(TIME)),
    row(225, "timer_getoverrun", Passes(TIME)),
    row(226, "timer_delete", Passes(TIME)),
    row(227, "clock_settime", Passes(TIME)),
    row(228, "clock_gettime", Passes(TIME)),
    row(229, "clock_getres", Passes(TIME)),
    row(230, "clock_nanosleep", Passes(TIME)),
    row(231, "exit_group", Passes(PROCESSES)),
    row(232, "epoll_wait", Passes(OTHER_FILES)),
    row(233, "epoll_ctl", File(2, refused::epoll_ctl)),
    row(234, "tgkill", Passes(SIGNALS)),
    row(235, "utimes", Paths(const { &[path(0)] }, status::utimes)),
    row(236, "vserver", Passes(ABSENT)),
    row(237, "mbind", Passes(MEMORY)),
    row(238, "set_mempolicy", Passes(MEMORY)),
    row(239, "get_mempolicy", Passes(MEMORY)),
    row(240, "mq_open", Passes(OTHER_FILES)),
    row(241, "mq_unlink", Passes(OTHER_FILES)),
    row(242, "mq_timedsend", Passes(OTHER_FILES)),
    row(243, "mq_timedreceive", Passes(OTHER_FILES)),
    row(244, "mq_notify", Passes(OTHER_FILES)),
    row(245, "mq_getsetattr", Passes(OTHER_FILES)),
    row(246, "kexec_load", Passes(SYSTEM)),
    row(247, "waitid", Passes(PROCESSES)),
    row(248, "add_key", Passes(IDENTITY)),
    row(249, "request_key", Passes(IDENTITY)),
    row(250, "keyctl", Passes(IDENTITY)),
    row(251, "ioprio_set", Passes(PROCESSES)),
    row(252, "ioprio_get", Passes(PROCESSES)),
    row(253, "inotify_init", Passes(MAKES)),
    row(254, "inotify_add_watch", Paths(const { &[path(1)] }, refused::no_watch)),
    row(255, "inotify_rm_watch", Passes(OTHER_FILES)),
    row(256, "migrate_pages", Passes(MEMORY)),
    row(257, "openat", Paths(const { &[at(0, 1).opened_by(2)] }, opens::openat)),
    row(258, "mkdirat", Paths(const { &[at(0, 1).entry().makes()] }, names::mkdirat)),
    row(259, "mknodat", Paths(const { &[at(0, 1).entry().makes()] }, names::mknodat)),
    row(260, "fchownat", Paths(const { &[at(0, 1).or_file()] }, status::fchownat)),
    row(261, "futimesat", Paths(const { &[at(0, 1).or_file()] }, status::futimesat)),
    row(262, "newfstatat", Paths(const { &[at(0, 1).or_file().or_null()] }, status::newfstatat)),
    row(263, "unlinkat", Paths(const { &[at(0, 1).entry()] }, names::unlinkat)),
    row(264, "renameat", Paths(const { &[at(0, 1).entry().makes(), at(2, 3).entry().makes()] }, names::renameat)),
    row(265, "linkat", Paths(const { &[at(0, 1).itself().or_file().makes(), at(2, 3).entry().makes()] }, names::linkat)),
    row(266, "symlinkat", Paths(const { &[at(1, 2).entry().makes()] }, names::symlinkat)),
    row(267, "readlinkat", Paths(const { &[at(0, 1).itself()] }, names::readlinkat)),
    row(268, "fchmodat", Paths(const { &[at(0, 1)] }, status::fchmodat)),
    row(269, "faccessat", Paths(const { &[at(0, 1)] }, status::faccessat)),
    row(270, "pselect6", Always(waits::pselect6)),
    row(271, "ppoll", Always(waits::ppoll)),
    row(272, "unshare", Passes(PROCESSES)),
    row(273, "set_robust_list", Passes(PROCESSES)),
    row(274, "get_robust_list", Passes(PROCESSES)),
    row(275, "splice", Files(0, 2, refused::splice)),
    row(276, "tee", Files(0, 1, refused::tee)),
    row(277, "sync_file_range", File(0, data::sync_file_range)),
    row(278, "vmsplice", File(0, refused::vmsplice)),
    row(279, "move_pages", Passes(MEMORY)),
    row(280, "utimensat", Paths(const { &[at(0, 1).or_file()] }, status::utimensat)),
    row(281, "epoll_pwait", Passes(OTHER_FILES)),
    row(282, "signalfd", Passes(SIGNALS)),
    row(283, "timerfd_create", Passes(TIME)),
    row(284, "eventfd", Passes(MAKES)),
    row(285, "fallocate", File(0, data::fallocate)),
    row(286, "timerfd_settime", Passes(TIME)),
    row(287, "timerfd_gettime", Passes(TIME)),
    row(288, "accept4", File(0, refused::not_a_socket)),
    row(289, "signalfd4", Passes(SIGNALS)),
    row(290, "eventfd2", Passes(MAKES)),
    row(291, "epoll_create1", Passes(MAKES)),
    row(292, "dup3", Files(0, 1, numbers::dup3)),
    row(293, "pipe2", Passes(MAKES)),
    row(294, "inotify_init1", Passes(MAKES)),
    row(295, "preadv", File(0, data::preadv)),
    row(296, "pwritev", File(0, data::pwritev)),
    row(297, "rt_tgsigqueueinfo", Passes(SIGNALS)),
    row(298, "perf_event_open", Passes(MAKES)),
    row(299, "recvmmsg", File(0, refused::not_a_socket)),
    row(300, "fanotify_init", Passes(MAKES)),
    row(301, "fanotify_mark", Paths(const { &[at(3, 4)] }, refused::no_mark)),
    row(302, "prlimit64", Always(process::set_limit)),
    row(303, "name_to_handle_at", Paths(const { &[at(0, 1).or_file()] }, refused::not_supported)),
    row(304, "open_by_handle_at", File(0, refused::not_supported)),
    row(305, "clock_adjtime", Passes(TIME)),
    row(306, "syncfs", File(0, data::syncfs)),
    row(307, "sendmmsg", File(0, refused::not_a_socket)),
    row(308, "setns", File(0, refused::invalid)),
    row(309, "getcpu", Passes(PROCESSES)),
    row(310, "process_vm_readv", Passes(MEMORY)),
    row(311, "process_vm_writev", Passes(MEMORY)),
    row(312, "kcmp", Passes(PROCESSES)),
    row(313, "finit_module", File(0, refused::invalid)),
    row(314, "sched_setattr", Passes(PROCESSES)),
    row(315, "sched_getattr", Passes(PROCESSES)),
    row(316, "renameat2", Paths(const { &[at(0, 1).entry().makes(), at(2, 3).entry().makes()] }, names::renameat2)),
    row(317, "seccomp", Passes(PROCESSES)),
    row(318, "getrandom", Passes(SYSTEM)),
    row(319, "memfd_create", Passes(MEMORY)),
    row(320, "kexec_file_load", Passes(SYSTEM)),
    row(321, "bpf", Passes(SYSTEM)),
    row(322, "execveat", Always(process::execveat)),
    row(323, "userfaultfd", Passes(MEMORY)),
    row(324, "membarrier", Passes(PROCESSES)),
    row(325, "mlock2", Passes(MEMORY)),
    row(326, "copy_file_range", Files(0, 2, copies::copy_file_range)),
    row(327, "preadv2", File(0, data::preadv2)),
    row(328, "pwritev2", File(0, data::pwritev2)),
    row(329, "pkey_mprotect", Always(process::protect)),
    row(330, "pkey_alloc", Passes(MEMORY)),
    row(331, "pkey_free", Passes(MEMORY)),
    row(332, "statx", Paths(const { &[at(0, 1).or_file().or_null()] }, status::statx)),
    row(333, "io_pgetevents", Passes(OTHER_FILES)),
    row(334, "rseq", Passes(PROCESSES)),
    row(335, "uretprobe", Passes(PROCESSES)),
    row(336, "uprobe", Passes(PROCESSES)),
    row(424, "pidfd_send_signal", Passes(SIGNALS)),
    row(425, "io_uring_setup", Always(rings::io_uring_setup)),
    row(426, "io_uring_enter", Passes(OTHER_FILES)),
    row(427, "io_uring_register", Passes(OTHER_FILES)),
    row(428, "open_tree", Paths(const { &[at(0, 1).or_file()] }, refused::invalid)),
    row(429, "move_mount", Paths(const { &[at(0, 1).or_file(), at(2, 3).or_file()] }, refused::invalid)),
    row(430, "fsopen", Passes(MAKES)),
    row(431, "fsconfig", Passes(OTHER_FILES)),
    row(432, "fsmount", Passes(OTHER_FILES)),
    row(433, "fspick", Paths(const { &[at(0, 1)] }, refused::invalid)),
    row(434, "pidfd_open", Passes(PROCESSES)),
    row(435, "clone3", Passes(PROCESSES)),
    row(436, "close_range", Always(numbers::close_range)),
    row(437, "openat2", Paths(const { &[at(0, 1)] }, opens::openat2)),
    row(438, "pidfd_getfd", Passes(PROCESSES)),
    row(439, "faccessat2", Paths(const { &[at(0, 1).or_file()] }, status::faccessat2)),
    row(440, "process_madvise", Passes(MEMORY)),
    row(441, "epoll_pwait2", Passes(OTHER_FILES)),
    row(442, "mount_setattr", Paths(const { &[at(0, 1).or_file()] }, refused::invalid)),
    row(443, "quotactl_fd", File(0, refused::not_supported)),
    row(444, "landlock_create_ruleset", Passes(PROCESSES)),
    row(445, "landlock_add_rule", Passes(PROCESSES)),
    row(446, "landlock_restrict_self", Passes(PROCESSES)),
    row(447, "memfd_secret", Passes(MEMORY)),
    row(448, "process_mrelease", Passes(MEMORY)),
    row(449, "futex_waitv", Passes(PROCESSES)),
    row(450, "set_mempolicy_home_node", Passes(MEMORY)),
    row(451, "cachestat", File(0, refused::not_supported)),
    row(452, "fchmodat2", Paths(const { &[at(0, 1).or_file()] }, status::fchmodat2)),
    row(453, "map_shadow_stack", Passes(MEMORY)),
    row(454, "futex_wake", Passes(PROCESSES)),
    row(455, "futex_wait", Passes(PROCESSES)),
    row(456, "futex_requeue", Passes(PROCESSES)),
    row(457, "statmount", Passes(SYSTEM)),
    row(458, "listmount", Passes(SYSTEM)),
    row(459, "lsm_get_self_attr", Passes(PROCESSES)),
    row(460, "lsm_set_self_attr", Passes(PROCESSES)),
    row(461, "lsm_list_modules", Passes(PROCESSES)),
    row(462, "mseal", Passes(MEMORY)),
    row(463, "setxattrat", Paths(const { &[at(0, 1).or_file()] }, refused::not_supported)),
    row(464, "getxattrat", Paths(const { &[at(0, 1).or_file()] }, refused::not_supported)),
    row(465, "listxattrat", Paths(const { &[at(0, 1).or_file()] }, refused::not_supported)),
    row(466, "removexattrat", Paths(const { &[at(0, 1).or_file()] }, refused::not_supported)),
    row(467, "open_tree_attr", Paths(const { &[at(0, 1).or_file()] }, refused::invalid)),
    row(468, "file_getattr", Paths(const { &[at(0, 1).or_file()] }, refused::not_supported)),
    row(469, "file_setattr", Paths(const { &[at(0, 1).or_file()] }, refused::not_supported)),
];

#[cfg(test)]
mod tests {
    use super::*;

    /// The highest number in the table: Linux 6.18.
    const LAST: usize = 469;

    #[test]
    fn every_number_is_decided_exactly_once() {
        let mut last = None;
        for row in ROWS {
            assert!(last < Some(row.number), "{} is out of order", row.name);
            last = Some(row.number);
        }
        let assigned = (0..=336).chain(424..=LAST);
        assert!(assigned.eq(ROWS.iter().map(|row| row.number)), "a number is missing or made up");
    }

    /// The kernel's own list, from the headers of this machine.
    #[test]
    fn names_and_numbers_are_the_kernels() {
        let header = ["/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm/unistd_64.h"]
            .iter()
            .find_map(|path| std::fs::read_to_string(path).ok())
            .expect("the kernel's headers are installed with the C compiler");
        let mut seen = 0;
        for line in header.lines() {
            let Some(rest) = line.strip_prefix("#define __NR_") else { continue };
            let (name, number) = rest.split_once(' ').unwrap();
            let number: usize = number.trim().parse().unwrap();
            let row = ROWS.iter().find(|row| row.number == number);
            let row = row.unwrap_or_else(|| panic!("{name} ({number}) is not in the table"));
            assert_eq!(row.name, name, "{number}");
            seen += 1;
        }
        assert!(seen > 300, "only {seen} numbers in the header");
    }

    /// Calls whose name shows that they take a path or a descriptor must not be among those that pass.
    #[test]
    fn calls_on_files_do_not_pass() {
        let marks =
            ["open", "stat", "read", "write", "link", "chmod", "chown", "xattr", "utime", "dup", "chdir"];
        let elsewhere = [MAKES, OTHER_FILES, SYSTEM, ABSENT];
        let exempt =
            ["process_vm_readv", "process_vm_writev", "pidfd_open", "sched_getattr", "sched_setattr"];
        for row in ROWS {
            let named = marks.iter().any(|mark| row.name.contains(mark));
            let passes = matches!(row.treatment, Passes(reason) if !elsewhere.contains(&reason));
            let thread = row.name.contains("thread");
            assert!(!named || !passes || thread || exempt.contains(&row.name), "{} passes", row.name);
        }
    }
}
