//! Moves of mappings that are made as one: all of them, or none.
//!
//! Between the first and the last nothing may be mapped at addresses of the application, among them stacks, the heap and the
//! data of this library. So the list lies in a mapping of its own, and who carries it out uses that and its own stack only.
#![allow(unsafe_code, reason = "a list in a mapping of its own, and mappings that are moved")]

use std::io;
use std::ops::Range;
use std::ptr::NonNull;

use super::pages;
use super::syscall::call;

/// A mapping, or a part of one, and where it goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Move {
    from: u64,
    to: u64,
    length: u64,
}

/// The moves, in order.
#[derive(Debug)]
pub struct Plan {
    place: NonNull<Move>,
    capacity: usize,
    count: usize,
}

impl Plan {
    /// Room for so many moves.
    pub fn new(capacity: usize) -> io::Result<Plan> {
        let size = capacity.saturating_mul(size_of::<Move>()).max(1) as u64;
        let place = pages::map_fresh(None, size, false)?;
        let place = NonNull::new(std::ptr::with_exposed_provenance_mut(place as usize));
        let place = place.ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
        Ok(Plan { place, capacity, count: 0 })
    }

    /// One more, behind those before. Its target is free by then, or a reservation of the caller's.
    pub fn push(&mut self, from: &Range<u64>, to: u64) -> io::Result<()> {
        if self.count >= self.capacity {
            return Err(io::Error::from_raw_os_error(libc::ENOMEM));
        }
        let length = from.end.saturating_sub(from.start);
        let place = self.place.as_ptr().wrapping_add(self.count);
        // SAFETY: the place lies in the mapping, which is this object's own.
        unsafe { place.write(Move { from: from.start, to, length }) };
        self.count = self.count.saturating_add(1);
        Ok(())
    }

    /// Makes them while all threads are stopped; after an error everything is where it was, and reservations are too.
    ///
    /// # Safety
    /// The sources are the caller's to move, and nobody uses them or the targets meanwhile.
    pub unsafe fn carry_out(&self) -> io::Result<()> {
        // SAFETY: so many moves have been written there.
        let moves = unsafe { std::slice::from_raw_parts(self.place.as_ptr(), self.count) };
        // SAFETY: the caller's promise.
        unsafe { carry_out(moves) }
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        let size = self.capacity.saturating_mul(size_of::<Move>()).max(1) as u64;
        let _ = pages::unmap(self.place.as_ptr().expose_provenance() as u64, size);
    }
}

/// # Safety
/// As that of the method. The arguments are values, and nothing else is read.
#[inline(never)]
unsafe fn carry_out(moves: &[Move]) -> io::Result<()> {
    for (done, it) in moves.iter().enumerate() {
        // SAFETY: the caller's promise.
        let Err(error) = (unsafe { pages::move_over(&(it.from..it.from.saturating_add(it.length)), it.to) })
        else {
            continue;
        };
        for it in moves.iter().take(done).rev() {
            // SAFETY: back to where it came from, which is free again.
            let _ = unsafe { pages::move_over(&(it.to..it.to.saturating_add(it.length)), it.from) };
        }
        moves.iter().for_each(|it| reserve(it.to, it.length));
        return Err(error);
    }
    Ok(())
}

/// Where a reservation was that a move has taken away; nothing where anything is mapped.
pub fn reserve(start: u64, length: u64) {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED_NOREPLACE;
    let arguments =
        [start as usize, length as usize, libc::PROT_NONE as usize, flags as usize, usize::MAX, 0];
    // SAFETY: the kernel takes only addresses that nothing uses.
    let _ = unsafe { call(libc::SYS_mmap, arguments) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::thunk::adopt::TABLE;
    use crate::thunk::adopt::stop::while_all_stopped;
    use crate::thunk::lock::lock;

    fn word(at: u64) -> u64 {
        // SAFETY: a mapping of the test's own.
        unsafe { std::ptr::with_exposed_provenance::<u64>(at as usize).read_volatile() }
    }

    fn mapped(value: u64) -> Range<u64> {
        let start = pages::map_fresh(None, 8192, false).unwrap();
        for at in [start, start + 4096] {
            // SAFETY: a mapping of the test's own.
            unsafe { std::ptr::with_exposed_provenance_mut::<u64>(at as usize).write_volatile(value) };
        }
        start..start + 8192
    }

    #[test]
    fn all_or_nothing() {
        // One stop at a time.
        let _table = lock(&TABLE);
        let (own, other, aside) = (mapped(1), mapped(2), mapped(0));
        let exchange = |end: Option<u64>| {
            let mut plan = Plan::new(3).unwrap();
            plan.push(&own, aside.start).unwrap();
            plan.push(&other, own.start).unwrap();
            if let Some(from) = end {
                plan.push(&(from..from + 4096), other.start).unwrap();
            }
            if end.is_some() {
                assert!(plan.push(&own, 0).is_err(), "there is room for three");
            }
            // Other tests must not be given the addresses meanwhile.
            // SAFETY: all of these are this test's own, which nobody else uses.
            while_all_stopped(&(0..0), &|| unsafe { plan.carry_out() })
        };
        // Nothing is mapped at the first page, which cannot be moved.
        match exchange(Some(0)) {
            Ok(done) => assert_eq!(done.unwrap_err().raw_os_error(), Some(libc::EFAULT)),
            Err(why) => {
                println!("SKIP: threads cannot be stopped here: {why}");
                return;
            }
        }
        assert_eq!((word(own.start), word(own.start + 4096), word(other.start)), (1, 1, 2));
        assert!(pages::is_mapped(&aside), "the reservation is there");
        exchange(None).unwrap().unwrap();
        assert_eq!((word(own.start), word(own.start + 4096), word(aside.start)), (2, 2, 1));
        for range in [own, aside] {
            pages::unmap(range.start, 8192).unwrap();
        }
    }
}
