//! The GPU's memory through the model's own page table.
//!
//! Pages of the model's memory files are accessed through a CPU map of the file. Pages of the process (user
//! pointers) are read and written by the kernel (`process_vm_readv(2)`), so that an address which is not
//! mapped any more is a fault and not the end of the process; for an atomic operation on such a page the
//! kernel is asked first whether it is there. A program that unmaps memory in just that moment while its GPU
//! uses it, or gives the GPU a page to write that it may not write itself, gets a SIGSEGV where hardware
//! would report a fault.
#![allow(unsafe_code, reason = "accesses memory that a page table leads to, shared with everybody")]

use std::os::raw::c_void;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, RwLockReadGuard};

use kfd_abi::drm::amdgpu::VmPageFlags;
use kfd_seam::{UserMemory, UserPtr};
use nix::errno::Errno;
use nix::libc;

use super::memory::overlaps_backwards;
use super::{Access, Memory};
use crate::arena::Arena;
use crate::process::Device;
use crate::space::{AddressSpace, Backing, Fault, FaultReason};

/// Where a page table is.
pub trait PageTable: Send + Sync {
    /// The page table, which does not change as long as this is held.
    fn space(&self) -> RwLockReadGuard<'_, AddressSpace>;

    /// A number that is another one whenever the page table may have changed, and that no other page table has. It does
    /// not change as long as the page table is held.
    fn generation(&self) -> u64;
}

/// The next number for [`PageTable::generation`].
pub fn next_generation() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl PageTable for Device {
    fn space(&self) -> RwLockReadGuard<'_, AddressSpace> {
        Device::space(self)
    }

    fn generation(&self) -> u64 {
        Device::generation(self)
    }
}

impl<T: PageTable> PageTable for Arc<T> {
    fn space(&self) -> RwLockReadGuard<'_, AddressSpace> {
        T::space(self)
    }

    fn generation(&self) -> u64 {
        T::generation(self)
    }
}

/// Memory as one GPU sees it.
#[derive(Debug)]
pub struct View<T> {
    gpu_id: u32,
    table: T,
}

impl<T: PageTable> View<T> {
    /// The view of the GPU that has this page table.
    pub fn new(gpu_id: u32, table: T) -> Self {
        Self { gpu_id, table }
    }

    fn fault(&self, va: u64, access: Access, reason: FaultReason) -> Fault {
        let access = if access == Access::Read { "read" } else { "write" };
        Fault { gpu_id: self.gpu_id, va, access, reason }
    }

    /// What lies at `va`, and how many bytes of it in a row, `length` at most.
    fn find<'a>(
        &self,
        space: &'a AddressSpace,
        va: u64,
        length: u64,
        access: Access,
    ) -> Result<(Place<'a>, u64), Fault> {
        let fault = |reason| self.fault(va, access, reason);
        let (start, mapping) = space.find(va).ok_or(fault(FaultReason::NotPresent))?;
        let (needed, otherwise) = match access {
            Access::Read => (VmPageFlags::PAGE_READABLE, FaultReason::NotReadable),
            Access::Write => (VmPageFlags::PAGE_WRITEABLE, FaultReason::ReadOnly),
        };
        if !mapping.flags.contains(needed) {
            return Err(fault(otherwise));
        }
        let inside = va.saturating_sub(start);
        let length = length.min(mapping.size.saturating_sub(inside));
        Place::of(&mapping.backing, inside, length).map_err(|_| fault(FaultReason::NoBacking))
    }

    /// Goes through a range, piece by piece.
    fn pieces(
        &self,
        va: u64,
        length: u64,
        access: Access,
        each: &mut dyn FnMut(Place<'_>, u64, u64) -> Result<(), Errno>,
    ) -> Result<(), Fault> {
        let space = self.table.space();
        let mut done = 0;
        while done < length {
            let at = va.wrapping_add(done);
            let (place, piece) = self.find(&space, at, length - done, access)?;
            each(place, done, piece).map_err(|_| self.fault(at, access, FaultReason::NoBacking))?;
            done += piece;
        }
        Ok(())
    }
}

/// Where bytes are.
#[derive(Clone, Copy)]
enum Place<'a> {
    /// In a map that lives as long as its arena, which the page table keeps.
    Host(NonNull<u8>, core::marker::PhantomData<&'a Arena>),
    /// At an address of the process that may be wrong.
    User(u64),
    /// Nowhere: zeros are read, and what is written is lost.
    Nowhere,
}

impl<'a> Place<'a> {
    fn of(backing: &'a Backing, inside: u64, length: u64) -> Result<(Self, u64), Errno> {
        match backing {
            Backing::Arena { arena, offset } => {
                let offset = offset.checked_add(inside).ok_or(Errno::EFAULT)?;
                let (pointer, length) = arena.host(offset, length)?;
                Ok((Self::Host(pointer, core::marker::PhantomData), length))
            }
            Backing::User(address) => {
                Ok((Self::User(address.checked_add(inside).ok_or(Errno::EFAULT)?), length))
            }
            Backing::Nothing => Ok((Self::Nowhere, length)),
        }
    }

    /// Copies bytes to a buffer of this process's own.
    fn load(self, buffer: &mut [u8]) -> Result<(), Errno> {
        match self {
            Self::Host(pointer, _) => {
                // SAFETY: `find` gave as many bytes as the buffer has, mapped as long as the page table is held; the
                // buffer is not in that map. Others may write the bytes meanwhile: what arrives then is a mix.
                unsafe { pointer.as_ptr().copy_to_nonoverlapping(buffer.as_mut_ptr(), buffer.len()) };
                Ok(())
            }
            Self::User(address) => UserMemory.read_bytes(UserPtr(address), buffer),
            Self::Nowhere => {
                buffer.fill(0);
                Ok(())
            }
        }
    }

    /// Copies bytes from a buffer of this process's own.
    fn store(self, bytes: &[u8]) -> Result<(), Errno> {
        match self {
            Self::Host(pointer, _) => {
                // SAFETY: as in `load`, the other way round.
                unsafe { pointer.as_ptr().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
                Ok(())
            }
            Self::User(address) => UserMemory.write_bytes(UserPtr(address), bytes),
            Self::Nowhere => Ok(()),
        }
    }

    /// Copies `length` bytes, which both places have in a row; true if it could.
    fn copy_from(self, from: Place<'_>, length: u64) -> Result<bool, Errno> {
        let length = usize::try_from(length).map_err(|_| Errno::EFAULT)?;
        match (self, from) {
            (Self::Host(to, _), Place::Host(from, _)) => {
                // SAFETY: both are mapped for as many bytes as long as the page table is held; they may overlap.
                unsafe { from.as_ptr().copy_to(to.as_ptr(), length) };
                Ok(true)
            }
            (Self::Host(to, _), Place::User(from)) => {
                move_user(libc::process_vm_readv, to, from, length)?;
                Ok(true)
            }
            (Self::User(to), Place::Host(from, _)) => {
                move_user(libc::process_vm_writev, from, to, length)?;
                Ok(true)
            }
            (Self::Nowhere, _) => Ok(true),
            (Self::Host(to, _), Place::Nowhere) => {
                // SAFETY: `to` is mapped for as many bytes as long as the page table is held.
                unsafe { to.as_ptr().write_bytes(0, length) };
                Ok(true)
            }
            (Self::User(_), Place::User(_) | Place::Nowhere) => Ok(false),
        }
    }

    /// A pointer to a word, if it can be read now.
    fn word(self, size: usize) -> Result<Option<NonNull<u8>>, Errno> {
        match self {
            Self::Host(pointer, _) => Ok(Some(pointer)),
            Self::User(address) => {
                let mut probe = [0u8; 8];
                let probe = probe.get_mut(..size).ok_or(Errno::EFAULT)?;
                UserMemory.read_bytes(UserPtr(address), probe)?;
                let address = usize::try_from(address).map_err(|_| Errno::EFAULT)?;
                Ok(NonNull::new(core::ptr::with_exposed_provenance_mut(address)))
            }
            Self::Nowhere => Ok(None),
        }
    }
}

/// The type of `process_vm_readv` and `process_vm_writev`.
type MoveUser = unsafe extern "C" fn(
    libc::pid_t,
    *const libc::iovec,
    libc::c_ulong,
    *const libc::iovec,
    libc::c_ulong,
    libc::c_ulong,
) -> libc::ssize_t;

/// Moves bytes between a map of the model and an address of the process that may be wrong.
fn move_user(call: MoveUser, host: NonNull<u8>, user: u64, length: usize) -> Result<(), Errno> {
    let user = usize::try_from(user).map_err(|_| Errno::EFAULT)?;
    let local = libc::iovec { iov_base: host.as_ptr().cast::<c_void>(), iov_len: length };
    let remote = libc::iovec { iov_base: core::ptr::without_provenance_mut(user), iov_len: length };
    let own = nix::unistd::getpid().as_raw();
    // SAFETY: both lists are of one element. The local one is mapped for `length` bytes; the kernel checks the other.
    let moved = unsafe { call(own, &raw const local, 1, &raw const remote, 1, 0) };
    if usize::try_from(moved) == Ok(length) { Ok(()) } else { Err(Errno::EFAULT) }
}

impl<T: PageTable> Memory for View<T> {
    fn read(&self, va: u64, buffer: &mut [u8]) -> Result<(), Fault> {
        self.pieces(va, buffer.len() as u64, Access::Read, &mut |place, done, piece| {
            place.load(part(buffer, done, piece)?)
        })
    }

    fn write(&self, va: u64, bytes: &[u8]) -> Result<(), Fault> {
        self.pieces(va, bytes.len() as u64, Access::Write, &mut |place, done, piece| {
            let (done, piece) = (done as usize, piece as usize);
            place.store(bytes.get(done..).and_then(|rest| rest.get(..piece)).ok_or(Errno::EFAULT)?)
        })
    }

    fn word(&self, va: u64, access: Access, operation: &mut dyn FnMut(&AtomicU32)) -> Result<(), Fault> {
        let space = self.table.space();
        let no_word = || self.fault(va, access, FaultReason::NoBacking);
        let (place, length) = self.find(&space, va, 4, access)?;
        if length < 4 {
            return Err(no_word());
        }
        match place.word(4).map_err(|_| no_word())? {
            None => operation(&AtomicU32::new(0)),
            Some(pointer) => {
                let pointer = pointer.cast::<u32>();
                if !pointer.is_aligned() {
                    return Err(no_word());
                }
                // SAFETY: aligned, and mapped as long as the page table is held (for pages of the process: see the
                // module's text). Others access it through atomics of their CPUs.
                operation(unsafe { AtomicU32::from_ptr(pointer.as_ptr()) });
            }
        }
        Ok(())
    }

    fn double_word(
        &self,
        va: u64,
        access: Access,
        operation: &mut dyn FnMut(&AtomicU64),
    ) -> Result<(), Fault> {
        let space = self.table.space();
        let no_word = || self.fault(va, access, FaultReason::NoBacking);
        let (place, length) = self.find(&space, va, 8, access)?;
        if length < 8 {
            return Err(no_word());
        }
        match place.word(8).map_err(|_| no_word())? {
            None => operation(&AtomicU64::new(0)),
            Some(pointer) => {
                let pointer = pointer.cast::<u64>();
                if !pointer.is_aligned() {
                    return Err(no_word());
                }
                // SAFETY: as in `word`.
                operation(unsafe { AtomicU64::from_ptr(pointer.as_ptr()) });
            }
        }
        Ok(())
    }

    fn copy(&self, to: u64, from: u64, length: u64) -> Result<(), Fault> {
        if overlaps_backwards(to, from, length) {
            return super::memory::copy_by_buffer(self, to, from, length);
        }
        let mut done = 0;
        while done < length {
            let space = self.table.space();
            let (to, from) = (to.wrapping_add(done), from.wrapping_add(done));
            let (source, piece) = self.find(&space, from, length - done, Access::Read)?;
            let (place, piece) = self.find(&space, to, piece, Access::Write)?;
            let copied = place.copy_from(source, piece);
            drop(space);
            match copied {
                Ok(true) => {}
                // Two places that only the kernel can read and write; or a fault, of which the slow way finds the side.
                Ok(false) | Err(_) => super::memory::copy_by_buffer(self, to, from, piece)?,
            }
            done += piece;
        }
        Ok(())
    }
}

fn part(buffer: &mut [u8], done: u64, length: u64) -> Result<&mut [u8], Errno> {
    let (done, length) = (done as usize, length as usize);
    buffer.get_mut(done..).and_then(|rest| rest.get_mut(..length)).ok_or(Errno::EFAULT)
}

#[cfg(test)]
mod tests;
