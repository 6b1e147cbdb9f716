//! Names of directory entries, and the cookies that order them.

/// Longest name, in bytes.
pub const NAME_BYTES_MAX: usize = 255;

/// Limit of names with the same hash in one directory: the low bits of a cookie distinguish them.
pub const COOKIE_SLOTS: u64 = 1 << 15;

/// One component of a path: 1 to 255 bytes, without `/` and NUL, and neither `.` nor `..`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name<'a>(&'a [u8]);

/// The reason for which bytes are not a [`Name`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NameError {
    /// No bytes, or `.` or `..`, or a `/` or NUL in it.
    Invalid,
    /// More than [`NAME_BYTES_MAX`].
    TooLong,
}

impl<'a> Name<'a> {
    /// Checks bytes.
    ///
    /// # Errors
    /// [`NameError`].
    pub fn new(bytes: &'a [u8]) -> Result<Self, NameError> {
        if bytes.len() > NAME_BYTES_MAX {
            return Err(NameError::TooLong);
        }
        if bytes.is_empty() || bytes == b"." || bytes == b".." || bytes.iter().any(|b| matches!(b, 0 | b'/'))
        {
            return Err(NameError::Invalid);
        }
        Ok(Self(bytes))
    }

    /// The bytes.
    pub fn bytes(&self) -> &'a [u8] {
        self.0
    }
}

/// Position of an entry in the order of its directory, stable while the entry exists: 48 bits of a hash of the name,
/// then a slot that distinguishes names with equal hashes. It is the key in the tree and also the offset that
/// `getdents` returns, so a program that knows the name knows the position, digested or not. Below 2^63; the first
/// two values are reserved for `.` and `..`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Cookie(u64);

impl Cookie {
    /// Before every entry of a directory.
    pub const START: Self = Self(COOKIE_SLOTS);

    /// The first cookie that a name can have: slot 0 of its hash.
    pub fn of_name(name: Name<'_>) -> Self {
        // FNV-1a, 64 bits, folded to 48 with a final mix; 0 is kept for the dot entries.
        let mut hash = 0xcbf2_9ce4_8422_2325_u64;
        for byte in name.bytes() {
            hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
        hash ^= hash >> 32;
        hash = hash.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let folded = (hash >> 16).max(1);
        Self(folded * COOKIE_SLOTS)
    }

    /// Converts a number read from a medium or given by a caller.
    pub const fn from_raw(raw: u64) -> Self {
        Self(raw)
    }

    /// The number.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// The next slot for a name with the same hash; `None` when all are taken.
    pub fn next_slot(self) -> Option<Self> {
        (!(self.0 + 1).is_multiple_of(COOKIE_SLOTS)).then_some(Self(self.0 + 1))
    }

    /// True if both belong to names with the same hash.
    pub fn same_hash(self, other: Self) -> bool {
        self.0 / COOKIE_SLOTS == other.0 / COOKIE_SLOTS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_checked() {
        assert!(Name::new(b"a").is_ok());
        assert!(Name::new(&[b'x'; 255]).is_ok());
        assert_eq!(Name::new(&[b'x'; 256]), Err(NameError::TooLong));
        for bad in [&b""[..], b".", b"..", b"a/b", b"a\0"] {
            assert_eq!(Name::new(bad), Err(NameError::Invalid), "{bad:?}");
        }
    }

    #[test]
    fn cookies_fit_an_offset_and_start_after_the_dots() {
        for i in 0..10_000u32 {
            let text = i.to_string();
            let cookie = Cookie::of_name(Name::new(text.as_bytes()).unwrap());
            assert!(cookie >= Cookie::START && cookie.get() < 1 << 63);
            assert!(cookie.same_hash(cookie.next_slot().unwrap()));
        }
    }

    #[test]
    fn slots_run_out() {
        let mut cookie = Cookie::of_name(Name::new(b"x").unwrap());
        let mut slots = 1;
        while let Some(next) = cookie.next_slot() {
            cookie = next;
            slots += 1;
        }
        assert_eq!(slots, COOKIE_SLOTS);
    }
}
