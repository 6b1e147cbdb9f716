//! Ranges of the kernel's pages.

/// Size of the kernel's pages.
pub(crate) const PAGE_BYTES: u64 = 4096;

/// Limit of ranges that are kept apart; if there are more, one range contains them and the pages between them.
const APART_MAX: usize = 16;

/// Offsets of the first byte and of the end, extended to whole pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PageRange(u64, u64);

impl PageRange {
    pub(crate) fn of(offset: u64, bytes: u64) -> Self {
        let end = offset.saturating_add(bytes).checked_next_multiple_of(PAGE_BYTES);
        Self(offset - offset % PAGE_BYTES, end.unwrap_or(u64::MAX))
    }

    fn with(self, other: Self) -> Self {
        Self(self.0.min(other.0), self.1.max(other.1))
    }

    fn overlaps(self, other: Self) -> bool {
        self.0.max(other.0) < self.1.min(other.1)
    }

    fn touches(self, other: Self) -> bool {
        self.0.max(other.0) <= self.1.min(other.1)
    }
}

/// A set of pages, by ranges that do not touch each other.
#[derive(Clone, Debug, Default)]
pub(crate) struct PageSet(Vec<PageRange>);

impl PageSet {
    pub(crate) fn add(&mut self, range: PageRange) {
        let mut all = range;
        self.0.retain(|other| {
            let joins = other.touches(all);
            if joins {
                all = all.with(*other);
            }
            !joins
        });
        if self.0.len() == APART_MAX {
            all = self.0.drain(..).fold(all, PageRange::with);
        }
        self.0.push(all);
    }

    /// Removes all pages that begin at `end` or later.
    pub(crate) fn cut(&mut self, end: u64) {
        let end = PageRange::of(0, end).1;
        self.0.iter_mut().for_each(|range| range.1 = range.1.min(end));
        self.0.retain(|range| range.0 < range.1);
    }

    pub(crate) fn overlaps(&self, range: PageRange) -> bool {
        self.0.iter().any(|other| other.overlaps(range))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(number: u64) -> PageRange {
        PageRange::of(number * PAGE_BYTES, 1)
    }

    #[test]
    fn a_set_has_the_pages_that_were_added_until_they_are_cut() {
        let mut set = PageSet::default();
        [9, 2, 4, 3].iter().for_each(|number| set.add(page(*number)));
        let has = |set: &PageSet| (0..12).filter(|number| set.overlaps(page(*number))).collect::<Vec<_>>();
        assert_eq!((has(&set), set.0.len()), (vec![2, 3, 4, 9], 2));
        set.cut(3 * PAGE_BYTES + 1);
        assert_eq!(has(&set), [2, 3]);
        set.cut(0);
        assert_eq!(has(&set), [0; 0]);
    }

    #[test]
    fn a_set_of_many_ranges_has_what_lies_between_them_too() {
        let mut set = PageSet::default();
        for number in 0..40 {
            set.add(page(number * 2));
            assert!(set.0.len() <= APART_MAX && set.overlaps(page(number * 2)) && set.overlaps(page(0)));
        }
    }
}
