//! Whether two addresses are the same word. Simulated processes live in one real process and map the same memory at
//! several addresses, as real ones do; the kernel compares file and offset, and so does this.

use std::path::Path;

/// The smallest page of any machine of ours.
const PAGE_BYTES: usize = 4096;

/// The object at an address.
#[derive(Clone, Debug, PartialEq, Eq)]
enum WordPlace {
    /// In a shared mapping: device and inode as /proc prints them, offset in the file.
    File(String, u64),
    /// In memory of this process alone.
    Own(usize),
}

/// The mappings of this process, as they are now.
#[derive(Debug)]
pub struct Places(Vec<Range>);

#[derive(Debug)]
struct Range {
    start: usize,
    end: usize,
    offset: u64,
    file: String,
}

impl Places {
    /// Reads them from /proc.
    pub fn now() -> Self {
        let maps = std::fs::read_to_string(Path::new("/proc/self/maps")).expect("/proc is mounted");
        Self(maps.lines().filter_map(shared_range).collect())
    }

    /// False if two addresses cannot be the same word: whole pages are mapped. Costs nothing, unlike a look at the mappings.
    pub fn may_be_same(one: usize, other: usize) -> bool {
        one % PAGE_BYTES == other % PAGE_BYTES
    }

    /// True if both addresses are the same word.
    pub fn same(&self, one: usize, other: usize) -> bool {
        one == other || self.place(one) == self.place(other)
    }

    fn place(&self, address: usize) -> WordPlace {
        match self.0.iter().find(|range| (range.start..range.end).contains(&address)) {
            Some(range) => WordPlace::File(range.file.clone(), range.offset + (address - range.start) as u64),
            None => WordPlace::Own(address),
        }
    }
}

/// A line of /proc/PID/maps, if it is of a shared mapping: `start-end perms offset device inode name`.
fn shared_range(line: &str) -> Option<Range> {
    let mut fields = line.split_ascii_whitespace();
    let (start, end) = fields.next()?.split_once('-')?;
    if !fields.next()?.ends_with('s') {
        return None;
    }
    let offset = u64::from_str_radix(fields.next()?, 16).ok()?;
    let file = format!("{} {}", fields.next()?, fields.next()?);
    let address = |text| usize::from_str_radix(text, 16).ok();
    Some(Range { start: address(start)?, end: address(end)?, offset, file })
}

#[cfg(test)]
mod tests {
    use super::*;
    use ipc::shared::create;
    use ipc::{Access, Mapping, Word};

    #[test]
    fn two_mappings_of_one_word_are_the_same() {
        let memory = create(c"place", 8192).unwrap();
        let map = || Mapping::new(&memory, 8192, Access::Write).unwrap();
        let (one, other) = (map().words::<Word>(0, 2048).unwrap(), map().words::<Word>(0, 2048).unwrap());
        let places = Places::now();
        assert_ne!(one[1500].address(), other[1500].address());
        assert!(places.same(one[1500].address(), other[1500].address()));
        assert!(Places::may_be_same(one[1500].address(), other[1500].address()));
        assert!(!Places::may_be_same(one[1500].address(), other[1501].address()));
        assert!(!places.same(one[1500].address(), other[1501].address()));
        let own = [Word::new(0), Word::new(0)];
        assert!(places.same(own[0].address(), own[0].address()));
        assert!(!places.same(own[0].address(), own[1].address()));
    }
}
