//! Costs of calls, for the test that asserts them from inside a program: `tests/cost.rs` of the program `hearth`.

use crate::local::local;
use crate::start::site;
use std::sync::atomic::{AtomicU64, Ordering};

/// Allocations of the library since the process began. The count is exact while one thread allocates. With several
/// threads some may be lost, because an atomic addition would cost too much.
pub static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

/// Counts one allocation.
#[inline]
pub fn count_allocation() {
    ALLOCATIONS.store(ALLOCATIONS.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
}

/// Stores three numbers: allocations of the library, fences of the update log, bytes written to it.
///
/// # Safety
/// `costs` points to three words.
#[unsafe(no_mangle)]
unsafe extern "C" fn hearth_costs(costs: *mut [u64; 3]) {
    let (fences, bytes) = local().inside(|| site().map_or((0, 0), |site| site.mount.log_costs()));
    // SAFETY: as the caller guarantees.
    unsafe { costs.write([ALLOCATIONS.load(Ordering::Relaxed), fences, bytes]) };
}
