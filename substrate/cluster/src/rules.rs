//! The fence in numbers: how long a heartbeat lets a member serve, and how long an expeller waits.
//!
//! With L the lease and d the drift bound, any clock shows between t(1-d) and t(1+d) for a true span t. A member
//! that sent a heartbeat at s (its clock) serves until s + L(1-d) on its clock, which comes at most L after the sending
//! in truth. An expeller that first saw that heartbeat's version at f (its clock) expels from f + L(1+d) on, which
//! comes at least L after it saw it in truth; and it saw it after it was sent. So the member has stopped. Rounding
//! goes to the safe side. Source: `docs/cluster.md`; leases by drifting clocks are Gray and Cheriton's.

use std::time::Duration;

/// Parts in a million of which a clock can be wrong at most.
pub const DRIFT_PPM_MAX: u32 = 100_000;

/// Lease and drift bound, the same for the whole cluster and all its life: they are a part of its view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rules {
    lease_ns: u64,
    drift_ppm: u32,
}

impl Rules {
    /// Shortest and longest lease.
    pub const LEASE: std::ops::RangeInclusive<Duration> =
        Duration::from_millis(10)..=Duration::from_secs(3600);

    /// Rules with this lease, for clocks that drift by at most so many parts in a million; `None` if the lease is not
    /// one of [`Self::LEASE`] or the drift more than [`DRIFT_PPM_MAX`].
    pub fn new(lease: Duration, drift_ppm: u32) -> Option<Self> {
        let lease_ns = u64::try_from(lease.as_nanos()).ok()?;
        (Self::LEASE.contains(&lease) && drift_ppm <= DRIFT_PPM_MAX).then_some(Self { lease_ns, drift_ppm })
    }

    /// L.
    pub const fn lease(&self) -> Duration {
        Duration::from_nanos(self.lease_ns)
    }

    /// The drift bound, in parts in a million.
    pub const fn drift_ppm(&self) -> u32 {
        self.drift_ppm
    }

    /// How long after its sending a heartbeat lets its member serve, on the member's clock: L(1-d).
    pub const fn valid_for(&self) -> Duration {
        Duration::from_nanos(self.lease_ns - self.drift_ns())
    }

    /// How long an expeller has seen a version before it expels, on its clock: L(1+d).
    pub const fn expel_after(&self) -> Duration {
        Duration::from_nanos(self.lease_ns + self.drift_ns())
    }

    /// Time from one heartbeat to the next: one may be lost, and the next still be slow.
    pub const fn beat_every(&self) -> Duration {
        Duration::from_nanos(self.lease_ns / 3)
    }

    /// How long a member waits for another's acknowledgement before it complains.
    pub const fn complain_after(&self) -> Duration {
        Duration::from_nanos(self.lease_ns / 2)
    }

    /// What a clock can be wrong by over L, rounded up.
    const fn drift_ns(&self) -> u64 {
        // At most an hour by a tenth: far from the ends of 64 bits.
        (self.lease_ns * self.drift_ppm as u64).div_ceil(1_000_000)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// On the fastest and slowest clocks allowed, the member's time ends before the expeller's: in exact numbers.
        #[test]
        fn a_member_stops_before_it_is_expelled(lease_ns in 10_000_000u64..=3_600_000_000_000, ppm in 0u32..=100_000) {
            let rules = Rules::new(Duration::from_nanos(lease_ns), ppm).unwrap();
            let (million, ppm) = (1_000_000u128, u128::from(ppm));
            // The slowest member's clock and the fastest expeller's; both sides times both rates.
            let member = rules.valid_for().as_nanos() * (million + ppm);
            let expeller = rules.expel_after().as_nanos() * (million - ppm);
            prop_assert!(member <= expeller);
            // And no more is given away than the bound asks for, but for the rounding.
            let exact = u128::from(lease_ns) * (million - ppm);
            prop_assert!(rules.valid_for().as_nanos() * million + million > exact);
        }
    }

    #[test]
    fn rules_have_bounds() {
        assert_eq!(Rules::new(Duration::from_secs(1), DRIFT_PPM_MAX + 1), None);
        assert_eq!(Rules::new(Duration::ZERO, 0), None);
        let rules = Rules::new(Duration::from_secs(1), 200).unwrap();
        assert_eq!(rules.valid_for(), Duration::from_nanos(999_800_000));
        assert_eq!(rules.expel_after(), Duration::from_nanos(1_000_200_000));
    }
}
