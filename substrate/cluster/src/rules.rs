//! The numbers of the fence: how long a heartbeat allows a member to serve, and how long an expeller waits.
//!
//! With L the lease and d the drift bound, any clock shows between t(1-d) and t(1+d) for a true time span t. A member
//! that sent a heartbeat at s (on its clock) serves until s + L(1-d) on its clock, which is at most a true time of L
//! after the sending. An expeller that first saw the version of that heartbeat at f (on its clock) expels from f +
//! L(1+d) on, which is at least a true time of L after it saw it; and it saw it after it was sent. So the member has
//! stopped. Rounding is to the safe side. Source: `docs/cluster.md`; leases with drifting clocks are from Gray and
//! Cheriton.

use std::time::Duration;

/// Limit of the rate error of a clock, in parts per million.
pub const DRIFT_PPM_MAX: u32 = 100_000;

/// Lease and drift bound: a part of the view, the same for the whole cluster as long as it exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rules {
    lease_ns: u64,
    drift_ppm: u32,
}

impl Rules {
    /// Shortest and longest lease.
    pub const LEASE: std::ops::RangeInclusive<Duration> =
        Duration::from_millis(10)..=Duration::from_secs(3600);

    /// Rules with this lease, for clocks that drift by at most this number of parts per million; `None` if the lease is
    /// not in [`Self::LEASE`] or the drift is more than [`DRIFT_PPM_MAX`].
    pub fn new(lease: Duration, drift_ppm: u32) -> Option<Self> {
        let lease_ns = u64::try_from(lease.as_nanos()).ok()?;
        (Self::LEASE.contains(&lease) && drift_ppm <= DRIFT_PPM_MAX).then_some(Self { lease_ns, drift_ppm })
    }

    /// The lease L.
    pub const fn lease(&self) -> Duration {
        Duration::from_nanos(self.lease_ns)
    }

    /// The drift bound, in parts per million.
    pub const fn drift_ppm(&self) -> u32 {
        self.drift_ppm
    }

    /// Time after its sending for which a heartbeat allows its member to serve, on the member's clock: L(1-d).
    pub const fn valid_for(&self) -> Duration {
        Duration::from_nanos(self.lease_ns - self.drift_ns())
    }

    /// Time for which an expeller has to see the same version, on its clock: L(1+d).
    pub const fn expel_after(&self) -> Duration {
        Duration::from_nanos(self.lease_ns + self.drift_ns())
    }

    /// Time from one heartbeat to the next: one may be lost, and the next one still be slow.
    pub const fn beat_every(&self) -> Duration {
        Duration::from_nanos(self.lease_ns / 3)
    }

    /// Time for which a member waits for another's acknowledgement before it complains.
    pub const fn complain_after(&self) -> Duration {
        Duration::from_nanos(self.lease_ns / 2)
    }

    /// Limit of the error of a clock over L, rounded up.
    const fn drift_ns(&self) -> u64 {
        // At most an hour times a tenth, which is far below 64 bits.
        (self.lease_ns * self.drift_ppm as u64).div_ceil(1_000_000)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Even with the slowest and fastest allowed clocks, the member stops before the expeller may expel it: in
        /// exact numbers.
        #[test]
        fn a_member_stops_before_it_is_expelled(lease_ns in 10_000_000u64..=3_600_000_000_000, ppm in 0u32..=100_000) {
            let rules = Rules::new(Duration::from_nanos(lease_ns), ppm).unwrap();
            let (million, ppm) = (1_000_000u128, u128::from(ppm));
            // The member has the slowest clock and the expeller the fastest; both sides times both rates.
            let member = rules.valid_for().as_nanos() * (million + ppm);
            let expeller = rules.expel_after().as_nanos() * (million - ppm);
            prop_assert!(member <= expeller);
            // And the margin is not larger than the bound requires, except for rounding.
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
