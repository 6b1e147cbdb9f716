//! The limits that an operator may change: `[limits]` in `hearth.toml`. A daemon reads them at its start.

use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use sharedfs::Config;
use std::ops::RangeInclusive;

/// Limits; those that are not written down have their defaults.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    /// Leases that one program, or one mount, may hold at once. With more of them it asks less often again for what it
    /// used before; each costs memory in the daemon while it is held.
    pub leases: u32,
    /// Inodes that the daemon remembers as met by one program, with or without a lease.
    pub known_inodes: usize,
    /// MiB of the largest update log of a program: how much it may write before records must be digested.
    pub log_mib: u64,
    /// Programs with a session at once.
    pub programs: usize,
}

const MIB: u64 = 1 << 20;

impl Default for Limits {
    fn default() -> Self {
        let config = Config::default();
        Self {
            leases: config.lease_words,
            known_inodes: config.known_max,
            log_mib: config.log_bytes_max / MIB,
            programs: config.sessions_max,
        }
    }
}

impl Limits {
    /// Whether all limits have their defaults.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// Refuses limits that cannot work.
    ///
    /// # Errors
    /// One of them is out of its bounds.
    pub fn check(&self) -> Result<()> {
        let known_min = u64::from(self.leases);
        let all: [(&str, u64, RangeInclusive<u64>); 4] = [
            ("leases", self.leases.into(), 128..=1 << 20),
            ("known_inodes", self.known_inodes as u64, known_min..=1 << 24),
            ("log_mib", self.log_mib, 1..=64),
            ("programs", self.programs as u64, 1..=1 << 14),
        ];
        match all.into_iter().find(|(_, value, bounds)| !bounds.contains(value)) {
            None => Ok(()),
            Some((name, value, bounds)) => Err(Error::new(format!(
                "hearth.toml: {name} = {value} in [limits] is not between {} and {}",
                bounds.start(),
                bounds.end()
            ))),
        }
    }

    /// Puts them into a daemon's settings.
    pub fn apply(&self, config: &mut Config) {
        config.lease_words = self.leases;
        config.known_max = self.known_inodes;
        config.log_bytes_max = self.log_mib * MIB;
        config.sessions_max = self.programs;
    }
}
