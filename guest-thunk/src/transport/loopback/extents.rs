//! Which pages of a range are free.

use std::collections::BTreeMap;

/// Free extents by their first page. Pages of different [`Extents::add`] calls are never joined.
#[derive(Debug, Default)]
pub(super) struct Extents {
    /// First free page, number of free pages, and the area that they belong to.
    free: BTreeMap<u64, (u64, usize)>,
    areas: usize,
}

impl Extents {
    /// Adds an area of free pages.
    pub(super) fn add(&mut self, first: u64, pages: u64) {
        self.free.insert(first, (pages, self.areas));
        self.areas = self.areas.saturating_add(1);
    }

    /// Takes adjacent pages, the lowest that fit, and tells their area.
    pub(super) fn take(&mut self, pages: u64) -> Option<(u64, usize)> {
        if pages == 0 {
            return None;
        }
        let (&first, &(found, area)) = self.free.iter().find(|(_, (found, _))| *found >= pages)?;
        self.free.remove(&first);
        let left = found.saturating_sub(pages);
        if left > 0 {
            self.free.insert(first.saturating_add(pages), (left, area));
        }
        Some((first, area))
    }

    /// Gives pages back that were taken from this area.
    pub(super) fn give(&mut self, first: u64, pages: u64, area: usize) {
        let (mut first, mut pages) = (first, pages);
        if let Some((&before, &(found, same))) = self.free.range(..first).next_back()
            && same == area
            && before.saturating_add(found) == first
        {
            self.free.remove(&before);
            first = before;
            pages = pages.saturating_add(found);
        }
        if let Some(&(found, same)) = self.free.get(&first.saturating_add(pages))
            && same == area
        {
            self.free.remove(&first.saturating_add(pages));
            pages = pages.saturating_add(found);
        }
        self.free.insert(first, (pages, area));
    }

    /// Free pages in all.
    #[cfg(test)]
    fn count(&self) -> u64 {
        self.free.values().map(|(pages, _)| pages).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_given_back_joins_its_neighbours_but_not_another_area() {
        let mut extents = Extents::default();
        extents.add(0, 10);
        extents.add(10, 10);
        let (a, area) = extents.take(4).unwrap();
        let (b, _) = extents.take(6).unwrap();
        assert_eq!((a, b), (0, 4));
        assert_eq!(extents.take(11), None, "no area is that large");
        extents.give(b, 6, area);
        extents.give(a, 4, area);
        assert_eq!(extents.count(), 20);
        assert_eq!(extents.take(10), Some((0, 0)), "the first area is whole again");
        assert_eq!(extents.take(10), Some((10, 1)));
        assert_eq!(extents.take(1), None);
    }
}
