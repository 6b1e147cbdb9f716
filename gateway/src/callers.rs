//! The caller of a request: the request contains user and group; supplementary groups are read from `/proc`.
//!
//! They are read again for each request whose answer may depend on them. A cache by process and start time would be
//! wrong: a program may call `setgroups` at any time, and does so a moment before it changes its user. Answers for root
//! never depend on groups, and a request through an open file uses the groups of its opening as long as user and group
//! are the same. So only paths of ordinary users have the cost (some 20 us).

use crate::abi::InHeader;
use std::borrow::Cow;
use vfs::Caller;

/// The caller of a request.
pub(crate) fn caller(header: &InHeader) -> Caller {
    let groups = if header.uid == 0 { Vec::new() } else { groups(header.pid) };
    Caller { uid: header.uid, gid: header.gid, groups }
}

/// The caller of a request about a file that `opener` opened.
pub(crate) fn caller_of_file<'a>(header: &InHeader, opener: &'a Caller) -> Cow<'a, Caller> {
    if (header.uid, header.gid) == (opener.uid, opener.gid) {
        Cow::Borrowed(opener)
    } else {
        Cow::Owned(caller(header))
    }
}

/// Supplementary groups of a thread, which exists because it waits for the answer. Empty if `/proc` does not show it:
/// it is the kernel's own, or belongs to another container.
fn groups(pid: u32) -> Vec<u32> {
    let status = if pid == 0 { None } else { std::fs::read_to_string(format!("/proc/{pid}/status")).ok() };
    status.as_deref().map(parse_groups).unwrap_or_default()
}

fn parse_groups(status: &str) -> Vec<u32> {
    let line = status.lines().find_map(|line| line.strip_prefix("Groups:"));
    line.unwrap_or_default().split_whitespace().filter_map(|group| group.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_read_from_the_status() {
        assert_eq!(parse_groups("Name:\tx\nGroups:\t4 24 1000 \nNStgid:\t1\n"), [4, 24, 1000]);
        assert_eq!(parse_groups("Groups:\t \n"), [0; 0]);
        assert_eq!(parse_groups(""), [0; 0]);
    }

    #[test]
    fn root_and_the_kernel_need_no_groups() {
        let header = InHeader { uid: 7, gid: 8, pid: 0, ..InHeader::default() };
        assert_eq!(caller(&header), Caller { uid: 7, gid: 8, groups: Vec::new() });
        let opener = Caller { uid: 7, gid: 8, groups: vec![9] };
        assert_eq!(caller_of_file(&header, &opener).groups, [9]);
        let other = InHeader { uid: 0, ..header };
        assert_eq!(caller_of_file(&other, &opener).uid, 0);
    }
}
