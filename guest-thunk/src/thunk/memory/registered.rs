//! Memory of the application that GPUs were given: registrations are counted, found by the application's address, and
//! have an address of their own for GPUs, as in AMD's library (`fmm_register_memory`, fmm.c).

use std::any::Any;
use std::sync::{Arc, Mutex};

use hsakmt_abi::memory::HsaMemFlags;
use hsakmt_abi::status::HsakmtStatus;
use kfd_abi::memory::AllocFlags;
use virtio_kfd_protocol::{GpuId, ResourceId};

use super::address::page_size;
use super::{Allocation, Backing, Host, Memory, Place, Request, State, reserve};
use crate::client::Client;
use crate::thunk::lock::{lock, read, write};
use crate::thunk::refusal::{Outcome, Refusal};

/// A part of a GUEST blob.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The blob.
    pub resource: ResourceId,
    /// Where in it, in bytes.
    pub offset: u64,
    /// Bytes.
    pub size: u64,
}

/// A range of the application that lies in GUEST blobs.
pub struct Registered {
    /// First byte, as the application named it.
    pub address: u64,
    /// Bytes, as the application named them.
    pub size: u64,
    /// Where its pages are, one after the other.
    pub pieces: Vec<Piece>,
    /// The GPU in whose name KFD has the buffer.
    pub gpu: GpuId,
    /// KFD's flags, with USERPTR.
    pub flags: AllocFlags,
    /// What keeps the range in the blob: dropped when the last registration has ended and KFD has freed the buffer.
    pub keep: Box<dyn Any + Send + Sync>,
}

impl Registered {
    /// Bytes of the whole pages that the range lies in.
    pub fn size_in_pages(&self) -> Option<u64> {
        let page = page_size();
        self.address.checked_rem(page)?.checked_add(self.size)?.checked_next_multiple_of(page)
    }
}

/// A registration of memory that the application has replaced.
pub struct Replaced(Arc<Allocation>);

fn require_unmapped(address: u64, state: &State) -> Outcome<()> {
    if state.mapped.is_empty() {
        return Ok(());
    }
    let why = format!(
        "{address:#x} is registered and mapped to GPUs, with memory that has been unmapped from this process since"
    );
    Err(Refusal::error(why))
}

impl Memory {
    /// Registers a range once more. False where there is no registration of exactly this range yet. As in AMD's library a
    /// range that is an allocation is an invalid handle, and a registration keeps its list of GPUs.
    pub fn register_again(&self, address: u64, size: u64, gpus: &[GpuId]) -> Outcome<bool> {
        let Some(allocation) = self.find_sized(address, size) else { return Ok(false) };
        if !matches!(allocation.backing, Backing::Registered(_)) {
            return Err(Refusal::handle("the memory is an allocation of this library"));
        }
        let mut state = lock(&allocation.state);
        if state.freed {
            return Ok(false);
        }
        if state.registered.is_empty() {
            state.register(gpus);
        } else if state.registered != gpus {
            let why = "the range is registered for other nodes";
            return Err(Refusal::new(HsakmtStatus::MEMORY_ALREADY_REGISTERED, why));
        }
        state.registrations = state.registrations.saturating_add(1);
        Ok(true)
    }

    /// The registration of exactly this range, if what the application has there now is other memory than what was registered,
    /// as `is_current` finds. An error where GPUs have the memory that was there mapped: they keep that.
    pub fn replaced(
        &self,
        address: u64,
        size: u64,
        gpus: &[GpuId],
        is_current: impl Fn(&Registered) -> Outcome<bool>,
    ) -> Outcome<Option<Replaced>> {
        let Some(allocation) = self.registered_range(address, size).filter(|_| size != 0) else {
            return Ok(None);
        };
        let Backing::Registered(registered) = &allocation.backing else { return Ok(None) };
        let state = lock(&allocation.state);
        let for_others = !state.registered.is_empty() && state.registered != gpus;
        if state.freed || for_others || is_current(registered)? {
            return Ok(None);
        }
        require_unmapped(address, &state)?;
        drop(state);
        Ok(Some(Replaced(allocation)))
    }

    /// Ends such a registration. The number of times that it was registered, which is 0 where another thread has ended it.
    pub fn end_replaced(&self, client: &Client, Replaced(allocation): Replaced) -> Outcome<u64> {
        let Backing::Registered(registered) = &allocation.backing else { return Ok(0) };
        let mut state = lock(&allocation.state);
        if state.freed {
            return Ok(0);
        }
        require_unmapped(registered.address, &state)?;
        self.give_up(client, &allocation, &mut state)?;
        let registrations = state.registrations;
        drop(state);
        self.forget_range((registered.address, registered.size), &allocation);
        self.forget(client, &allocation);
        Ok(registrations)
    }

    /// Writes a new registration down, for these GPUs or, where the list is empty, for all. The address for GPUs is
    /// another one than the application's, since ranges may overlap.
    pub fn insert_registered(
        &self,
        host: Host<'_>,
        registered: Registered,
        gpus: &[GpuId],
        flags: HsaMemFlags,
    ) -> Outcome<()> {
        let size = registered.size_in_pages().filter(|size| *size > 0);
        let size = size.ok_or_else(|| Refusal::parameter("MemorySizeInBytes is beyond the address space"))?;
        let node = host.snapshot.node_of(registered.gpu)?;
        let request = Request { node, size, alignment: 0, flags, address: 0 };
        let reservation = reserve(host, size, request)
            .map_err(|refusal| Refusal { status: HsakmtStatus::ERROR, ..refusal })?;
        let key = (registered.address, registered.size);
        let mut state = State { registrations: 1, ..State::default() };
        state.register(gpus);
        let allocation = Arc::new(Allocation {
            place: Place::Reserved(reservation),
            backing: Backing::Registered(registered),
            node,
            flags,
            state: Mutex::new(state),
        });
        // Another thread may have been faster; then what keeps this one goes again.
        loop {
            let mut ranges = write(&self.registered);
            let Some(other) = ranges.get(&key).cloned() else {
                write(&self.allocations).insert(allocation.start(), Arc::clone(&allocation));
                ranges.insert(key, allocation);
                return Ok(());
            };
            drop(ranges);
            if self.register_again(key.0, key.1, gpus)? {
                return Ok(());
            }
            // A third one ends that registration right now.
            self.forget_range(key, &other);
        }
    }

    /// Takes a registration that has ended out of the table of ranges, unless a new one has its place already.
    fn forget_range(&self, key: (u64, u64), ended: &Arc<Allocation>) {
        let mut ranges = write(&self.registered);
        if ranges.get(&key).is_some_and(|there| Arc::ptr_eq(there, ended)) {
            ranges.remove(&key);
        }
    }

    /// `hsaKmtDeregisterMemory`: ends a registration, by the application's address or the GPUs'.
    pub fn deregister(&self, client: &Client, address: u64) -> Outcome<()> {
        let unknown = || {
            let why = format!("{address:#x} is not registered, or by more than one size");
            Refusal::new(HsakmtStatus::MEMORY_NOT_REGISTERED, why)
        };
        let allocation = self.find_sized(address, 0).ok_or_else(unknown)?;
        let mut state = lock(&allocation.state);
        if state.freed {
            return Err(unknown());
        }
        match &allocation.backing {
            Backing::Registered(_) if state.registrations > 1 => {
                state.registrations = state.registrations.saturating_sub(1);
                Ok(())
            }
            // Of what is still mapped KFD keeps the buffer, and AMD's library the registration, without a word: it can be
            // ended again once it is unmapped.
            Backing::Registered(_) | Backing::Imported(_) if !state.mapped.is_empty() => Ok(()),
            Backing::Registered(registered) => {
                self.give_up(client, &allocation, &mut state)?;
                drop(state);
                self.forget_range((registered.address, registered.size), &allocation);
                self.forget(client, &allocation);
                Ok(())
            }
            Backing::Imported(_) => {
                self.give_up(client, &allocation, &mut state)?;
                drop(state);
                self.forget(client, &allocation);
                Ok(())
            }
            _ if state.registered.is_empty() => Err(unknown()),
            _ => {
                state.register(&[]);
                Ok(())
            }
        }
    }

    /// The registration that an address of the application lies in; of several that overlap the one that begins last.
    pub(super) fn registered_at(&self, address: u64) -> Option<Arc<Allocation>> {
        let ranges = read(&self.registered);
        let mut before = ranges.range(..=(address, u64::MAX)).rev();
        let inside = |(start, size): (u64, u64)| address.checked_sub(start).is_some_and(|at| at < size);
        before.find(|(key, _)| inside(**key)).map(|(_, allocation)| Arc::clone(allocation))
    }

    /// The registration of a range, or, with a size of 0, the only one that begins there.
    pub(super) fn registered_range(&self, address: u64, size: u64) -> Option<Arc<Allocation>> {
        let ranges = read(&self.registered);
        if size != 0 {
            return ranges.get(&(address, size)).cloned();
        }
        let mut here = ranges.range((address, 0)..=(address, u64::MAX));
        let first = here.next()?;
        here.next().is_none().then(|| Arc::clone(first.1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_has_the_pages_that_it_touches() {
        let registered = |address, size| Registered {
            address,
            size,
            pieces: Vec::new(),
            gpu: GpuId(1),
            flags: AllocFlags::USERPTR,
            keep: Box::new(()),
        };
        let page = page_size();
        assert_eq!(registered(3, 9001).size_in_pages(), Some(9004u64.next_multiple_of(page)));
        assert_eq!(registered(page - 1, 2).size_in_pages(), Some(2 * page));
        assert_eq!(registered(page, page).size_in_pages(), Some(page));
        assert_eq!(registered(page, u64::MAX).size_in_pages(), None);
    }
}
