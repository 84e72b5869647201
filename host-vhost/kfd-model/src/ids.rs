//! Small numbers for things: the lowest free one, as the kernel's IDR gives them.

use std::collections::{BTreeMap, BTreeSet};

/// Things by number.
#[derive(Debug)]
pub struct Ids<T> {
    items: BTreeMap<u32, T>,
    /// Numbers below `next` that were given back.
    free: BTreeSet<u32>,
    next: u32,
}

impl<T> Ids<T> {
    /// Numbers from `first` on.
    pub fn starting_at(first: u32) -> Self {
        Self { items: BTreeMap::new(), free: BTreeSet::new(), next: first }
    }

    /// Gives the lowest free number below `end`; `None` when there is none (`idr_alloc`).
    pub fn insert(&mut self, item: T, end: u32) -> Option<u32> {
        let id = match self.free.first().copied() {
            Some(id) if id < end => {
                self.free.remove(&id);
                id
            }
            Some(_) => return None,
            None if self.next < end => {
                let id = self.next;
                self.next = id.checked_add(1)?;
                id
            }
            None => return None,
        };
        self.items.insert(id, item);
        Some(id)
    }

    /// Takes the thing and frees its number.
    pub fn remove(&mut self, id: u32) -> Option<T> {
        let item = self.items.remove(&id)?;
        self.free.insert(id);
        Some(item)
    }

    /// The thing with a number.
    pub fn get(&self, id: u32) -> Option<&T> {
        self.items.get(&id)
    }

    /// The thing with a number, to change it.
    pub fn get_mut(&mut self, id: u32) -> Option<&mut T> {
        self.items.get_mut(&id)
    }

    /// All numbers with their things, in order.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        self.items.iter().map(|(id, item)| (*id, item))
    }

    /// All things with their numbers, in order, to change them.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (u32, &mut T)> {
        self.items.iter_mut().map(|(id, item)| (*id, item))
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.items.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_free_number_is_taken() {
        let mut ids = Ids::starting_at(1);
        assert_eq!((ids.insert('a', 4), ids.insert('b', 4), ids.insert('c', 4)), (Some(1), Some(2), Some(3)));
        assert_eq!(ids.insert('d', 4), None);
        assert_eq!(ids.remove(2), Some('b'));
        assert_eq!(ids.remove(2), None);
        assert_eq!(ids.insert('e', 4), Some(2));
        assert_eq!(ids.remove(3), Some('c'));
        assert_eq!(ids.insert('f', 3), None, "3 is free, but not below 3");
        assert_eq!(ids.len(), 2);
    }
}
