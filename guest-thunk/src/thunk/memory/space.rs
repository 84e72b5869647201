//! Which parts of a range are free.

use std::collections::BTreeMap;

/// Free extents by their start.
#[derive(Debug, Default)]
pub(super) struct Space {
    free: BTreeMap<u64, u64>,
}

impl Space {
    /// A range of `size` bytes from `start` on, all of it free.
    pub(super) fn new(start: u64, size: u64) -> Space {
        Space { free: BTreeMap::from([(start, size)]) }
    }

    /// Takes `size` bytes at a multiple of `align`, the lowest that fit. `align` is a power of two.
    pub(super) fn take(&mut self, size: u64, align: u64) -> Option<u64> {
        let fit = |(&start, &length): (&u64, &u64)| {
            let at = start.checked_next_multiple_of(align)?;
            let end = at.checked_add(size)?;
            (size > 0 && end <= start.checked_add(length)?).then_some((start, length, at, end))
        };
        let (start, length, at, end) = self.free.iter().find_map(fit)?;
        self.free.remove(&start);
        if at > start {
            self.free.insert(start, at.saturating_sub(start));
        }
        let rest = start.saturating_add(length).saturating_sub(end);
        if rest > 0 {
            self.free.insert(end, rest);
        }
        Some(at)
    }

    /// Gives back what was taken.
    pub(super) fn give(&mut self, start: u64, size: u64) {
        let (mut start, mut size) = (start, size);
        if let Some((&before, &length)) = self.free.range(..start).next_back()
            && before.saturating_add(length) == start
        {
            self.free.remove(&before);
            start = before;
            size = size.saturating_add(length);
        }
        if let Some(length) = self.free.remove(&start.saturating_add(size)) {
            size = size.saturating_add(length);
        }
        self.free.insert(start, size);
    }

    /// Free bytes in all.
    pub(super) fn bytes(&self) -> u64 {
        self.free.values().fold(0, |sum, length| sum.saturating_add(*length))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn aligned_pieces_come_and_go_until_all_is_one_again() {
        let mut space = Space::new(0, 100);
        let (a, b) = (space.take(10, 1).unwrap(), space.take(10, 16).unwrap());
        assert_eq!((a, b), (0, 16));
        assert_eq!(space.take(6, 1), Some(10), "the gap before the aligned one");
        assert_eq!(space.bytes(), 74);
        assert_eq!(space.take(75, 1), None);
        assert_eq!(space.take(0, 1), None);
        assert_eq!(space.take(u64::MAX, 1), None);
        for (start, size) in [(10, 6), (0, 10), (16, 10)] {
            space.give(start, size);
        }
        assert_eq!(space.take(100, 1), Some(0));
    }
}
