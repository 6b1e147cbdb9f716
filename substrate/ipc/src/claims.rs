//! Allocator of small numbers for the threads of one process: slots of a ring, slots of the operation table. The
//! allocator lies in private memory, so no other process can make two threads hold the same number.

use crate::sync::{LongWord, Ordering};

/// A set of numbers, each free or taken.
#[derive(Debug)]
pub struct Claims {
    /// One bit a number, set while the number is taken; bits beyond the count are always set.
    taken: Vec<LongWord>,
}

const BITS: usize = u64::BITS as usize;

impl Claims {
    /// Makes a set of the numbers 0 to `count` - 1, all free.
    pub fn new(count: usize) -> Self {
        let words = count.div_ceil(BITS);
        let taken = (0..words).map(|word| {
            let here = (count - word * BITS).min(BITS);
            LongWord::new(if here == BITS { 0 } else { u64::MAX << here })
        });
        Self { taken: taken.collect() }
    }

    /// Takes the lowest free number; `None` if all are taken.
    pub fn claim(&self) -> Option<usize> {
        for (index, word) in self.taken.iter().enumerate() {
            let mut bits = word.load(Ordering::Relaxed);
            while bits != u64::MAX {
                let bit = bits.trailing_ones();
                // Acquire: pairs with the Release of the previous holder, which has finished its use of the number.
                match word.compare_exchange(bits, bits | 1 << bit, Ordering::Acquire, Ordering::Relaxed) {
                    Ok(_) => return Some(index * BITS + bit as usize),
                    Err(found) => bits = found,
                }
            }
        }
        None
    }

    /// Returns a number to the set.
    pub fn release(&self, number: usize) {
        let bit = 1u64 << (number % BITS);
        // Release: pairs with the Acquire of the next holder.
        let before = self.taken[number / BITS].fetch_and(!bit, Ordering::Release);
        assert!(before & bit != 0, "only a taken number is given back");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_held_by_one_and_come_back() {
        for count in [0, 1, 63, 64, 65, 130] {
            let claims = Claims::new(count);
            let taken: Vec<_> = std::iter::from_fn(|| claims.claim()).collect();
            assert_eq!(taken, (0..count).collect::<Vec<_>>());
            if count > 0 {
                claims.release(count / 2);
                assert_eq!(claims.claim(), Some(count / 2));
                assert_eq!(claims.claim(), None);
            }
        }
    }
}
