//! The table of handles.

use virtio_kfd_protocol::Handle;

/// The first generation that no handle has: from it on the number would look like a share token.
const GENERATIONS: u32 = 1 << 31;

/// Values by handle. A handle is good for one value only: each reuse of a slot has another generation, and a slot
/// whose generations are used up is not used again.
#[derive(Debug)]
pub struct Table<T> {
    slots: Vec<Slot<T>>,
    /// The first index that no slot has.
    end: u32,
    free: Vec<u32>,
    live: usize,
}

#[derive(Debug)]
struct Slot<T> {
    generation: u32,
    value: Option<T>,
}

impl<T> Table<T> {
    /// An empty table.
    pub fn new() -> Self {
        Table { slots: Vec::new(), end: u32::MAX, free: Vec::new(), live: 0 }
    }

    /// Values in it.
    pub fn len(&self) -> usize {
        self.live
    }

    /// Puts a value in.
    ///
    /// # Errors
    /// The value, when all slots are used up.
    pub fn insert(&mut self, value: T) -> Result<Handle, T> {
        if self.free.is_empty() {
            let Some(index) = u32::try_from(self.slots.len()).ok().filter(|index| *index < self.end) else {
                return Err(value);
            };
            self.slots.push(Slot { generation: 1, value: None });
            self.free.push(index);
        }
        let index = self.free.last().copied();
        let Some((index, slot)) = index.and_then(|index| Some((index, self.slots.get_mut(index as usize)?)))
        else {
            return Err(value);
        };
        slot.value = Some(value);
        let handle = Handle::new(index, slot.generation);
        self.free.pop();
        self.live = self.live.saturating_add(1);
        Ok(handle)
    }

    /// The value of a handle.
    pub fn get(&self, handle: Handle) -> Option<&T> {
        let slot = self.slots.get(handle.index() as usize)?;
        if slot.generation == handle.generation() { slot.value.as_ref() } else { None }
    }

    /// The value of a handle, to change.
    pub fn get_mut(&mut self, handle: Handle) -> Option<&mut T> {
        let slot = self.slots.get_mut(handle.index() as usize)?;
        if slot.generation == handle.generation() { slot.value.as_mut() } else { None }
    }

    /// Takes a value out; its handle is good for nothing from then on.
    pub fn remove(&mut self, handle: Handle) -> Option<T> {
        let slot = self.slots.get_mut(handle.index() as usize)?;
        if slot.generation != handle.generation() {
            return None;
        }
        let value = slot.value.take()?;
        slot.generation = slot.generation.saturating_add(1);
        if slot.generation < GENERATIONS {
            self.free.push(handle.index());
        }
        self.live = self.live.saturating_sub(1);
        Some(value)
    }

    /// Handles of the values for which `wanted` holds.
    pub fn find(&self, wanted: impl Fn(&T) -> bool) -> Vec<Handle> {
        let handles = (0u32..).zip(&self.slots);
        let wanted = handles.filter(|(_, slot)| slot.value.as_ref().is_some_and(&wanted));
        wanted.map(|(index, slot)| Handle::new(index, slot.generation)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_freed_handle_stays_bad_when_its_slot_is_used_again() {
        let mut table = Table::new();
        let old = table.insert("old").unwrap();
        assert!(!old.is_none() && old.generation() != Handle::IN_FRAME);
        assert_eq!(table.remove(old), Some("old"));
        assert_eq!(table.remove(old), None);
        let new = table.insert("new").unwrap();
        assert_eq!((new.index(), table.len()), (old.index(), 1));
        assert_ne!(new, old);
        assert_eq!((table.get(old), table.get(new)), (None, Some(&"new")));
    }

    #[test]
    fn a_slot_is_retired_before_its_generation_means_something_else() {
        let mut table = Table::new();
        let first = table.insert(1).unwrap();
        table.slots[0].generation = GENERATIONS - 1;
        let last = Handle::new(first.index(), GENERATIONS - 1);
        assert_eq!(virtio_kfd_protocol::ShareToken::from_blob_id(last.0), None);
        assert_eq!(table.remove(last), Some(1));
        assert_eq!(table.insert(2).unwrap().index(), 1);
        assert_eq!(table.get(Handle::in_frame(0)), None);
    }

    #[test]
    fn a_value_comes_back_when_all_slots_are_used_up() {
        let mut table = Table::new();
        table.end = 2;
        let first = table.insert("first").unwrap();
        table.slots[0].generation = GENERATIONS - 1;
        let retired = Handle::new(first.index(), GENERATIONS - 1);
        let second = table.insert("second").unwrap();
        assert_eq!(table.insert("third"), Err("third"));
        assert_eq!(table.remove(retired), Some("first"));
        assert_eq!((table.insert("third"), table.len()), (Err("third"), 1), "its slot is retired");
        assert_eq!(table.remove(second), Some("second"));
        let third = table.insert("third").unwrap();
        assert_eq!((third.index(), table.get(third)), (second.index(), Some(&"third")));
    }

    #[test]
    fn handles_that_were_never_given_out_name_nothing() {
        let mut table = Table::new();
        table.insert(1).unwrap();
        for handle in
            [Handle::NONE, Handle::new(0, 2), Handle::new(1, 1), Handle(u64::MAX), Handle::in_frame(0)]
        {
            assert_eq!(table.get(handle), None, "{handle:?}");
            assert_eq!(table.remove(handle), None, "{handle:?}");
        }
        assert_eq!(table.len(), 1);
    }
}
