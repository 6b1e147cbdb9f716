//! The count of remaining descriptors, tested in a process of its own, whose limit the test sets.

#![allow(clippy::unwrap_used, reason = "a test ends where something unexpected is")]

use ipc::shared::create;
use ipc::socket::{descriptors_left, descriptors_max};

#[test]
fn as_many_are_left_as_can_be_opened() {
    for limit in [300, 1024, 64] {
        let limits = libc::rlimit { rlim_cur: limit, rlim_max: 1024 };
        // SAFETY: the kernel reads the structure.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limits) }, 0);
        assert_eq!(descriptors_max(), Some(limit));
        let mut left = descriptors_left(usize::MAX);
        assert!(left > 20 && left < limit as usize, "{left} of {limit}");
        assert_eq!(descriptors_left(7), 7);
        let (mut held, mut with_gap) = (Vec::new(), false);
        while let Ok(descriptor) = create(c"held", 4096) {
            held.push(descriptor);
            left -= 1;
            assert_eq!(descriptors_left(usize::MAX), left);
            if left == 10 && !with_gap {
                with_gap = true;
                // A gap below counts as well.
                held.remove(3);
                left += 1;
                assert_eq!(descriptors_left(usize::MAX), left);
            }
        }
        assert_eq!(left, 0, "of {limit}");
    }
}
