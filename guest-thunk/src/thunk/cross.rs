//! Memory of another process: `hsaKmtProcessVMRead` and `hsaKmtProcessVMWrite`.
//!
//! AMD's library handed them to KFD once (CROSS_MEMORY_COPY, in DKMS kernels only). Here the guest's kernel does it, with its
//! own rules of who may look into whom (`ptrace_may_access`). It reaches ordinary memory of the other process; memory
//! that lies in blobs it does not (docs/limits.md).
#![allow(unsafe_code, reason = "process_vm_readv and process_vm_writev")]

use std::collections::VecDeque;
use std::io;

use crate::thunk::refusal::{Outcome, Refusal};

/// A range of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// First address.
    pub address: u64,
    /// Bytes.
    pub size: u64,
}

/// Which way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the other process.
    Read,
    /// To the other process.
    Write,
}

/// Bytes in one system call: the kernel cuts longer ones anyway (`MAX_RW_COUNT`).
const MOST: u64 = 1 << 30;

/// Copies as much as both lists have room for, in their order. Gives how many bytes were copied, even where it then fails.
pub fn copy(pid: u32, local: &[Range], remote: &[Range], direction: Direction) -> (u64, Outcome<()>) {
    let mut copied: u64 = 0;
    let pid = match libc::pid_t::try_from(pid) {
        Ok(pid) if pid > 0 => pid,
        _ => return (0, Err(Refusal::parameter(format!("Pid is {pid}")))),
    };
    let (mut local, mut remote) = (queue(local), queue(remote));
    while let (Some(ours), Some(theirs)) = (local.front_mut(), remote.front_mut()) {
        let size = ours.size.min(theirs.size).min(MOST);
        match transfer(pid, ours.address, theirs.address, size, direction) {
            Ok(0) => {
                let why = format!("nothing could be copied at {:#x} of process {pid}", theirs.address);
                return (copied, Err(Refusal::error(why)));
            }
            Ok(done) => {
                copied = copied.saturating_add(done);
                for range in [ours, theirs] {
                    range.address = range.address.saturating_add(done);
                    range.size = range.size.saturating_sub(done);
                }
            }
            Err(error) => {
                let why = format!("{size:#x} bytes at {:#x} of process {pid}: {error}", theirs.address);
                return (copied, Err(Refusal::error(why)));
            }
        }
        drop_empty(&mut local);
        drop_empty(&mut remote);
    }
    (copied, Ok(()))
}

fn queue(ranges: &[Range]) -> VecDeque<Range> {
    ranges.iter().copied().filter(|range| range.size > 0).collect()
}

fn drop_empty(ranges: &mut VecDeque<Range>) {
    if ranges.front().is_some_and(|range| range.size == 0) {
        ranges.pop_front();
    }
}

fn transfer(pid: libc::pid_t, ours: u64, theirs: u64, size: u64, direction: Direction) -> io::Result<u64> {
    let invalid = |_| io::Error::from_raw_os_error(libc::EFAULT);
    let vector = |address: u64| -> io::Result<libc::iovec> {
        let base = std::ptr::with_exposed_provenance_mut(usize::try_from(address).map_err(invalid)?);
        Ok(libc::iovec { iov_base: base, iov_len: usize::try_from(size).map_err(invalid)? })
    };
    let (ours, theirs) = (vector(ours)?, vector(theirs)?);
    let done = match direction {
        // SAFETY: each list has one entry. The kernel checks the addresses of both processes; this one's range is the
        // caller's to be written, as it promised by calling hsaKmtProcessVMRead.
        Direction::Read => unsafe { libc::process_vm_readv(pid, &ours, 1, &theirs, 1, 0) },
        // SAFETY: each list has one entry. The kernel checks the addresses of both processes, and only reads ours.
        Direction::Write => unsafe { libc::process_vm_writev(pid, &ours, 1, &theirs, 1, 0) },
    };
    u64::try_from(done).map_err(|_| io::Error::last_os_error())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range<T>(values: &[T]) -> Range {
        Range { address: values.as_ptr().expose_provenance() as u64, size: size_of_val(values) as u64 }
    }

    #[test]
    fn lists_of_any_cut_are_copied_in_order() {
        let own = std::process::id();
        let source: Vec<u8> = (0..100).collect();
        let (mut first, mut second) = (vec![0u8; 30], vec![0u8; 70]);
        let target = [range(first.as_mut_slice()), range(second.as_mut_slice())];
        let cut = [range(&source[..55]), range(&source[55..55]), range(&source[55..])];
        assert_eq!(copy(own, &target, &cut, Direction::Read), (100, Ok(())));
        assert_eq!((&first[..], &second[..]), (&source[..30], &source[30..]));
        let (back, from) = ([0u8; 50], range(&second));
        assert_eq!(copy(own, &[from], &[range(&back)], Direction::Write), (50, Ok(())));
        // SAFETY: the array lives; its bytes were changed behind the compiler's back.
        let seen = unsafe { std::ptr::from_ref(&back).read_volatile() };
        assert_eq!(seen, second[..50]);
    }

    #[test]
    fn what_cannot_be_reached_is_told_with_what_was_copied() {
        let own = std::process::id();
        let mut target = [0u8; 16];
        let source = [7u8; 8];
        let unmapped = Range { address: 8, size: 8 };
        let (copied, result) =
            copy(own, &[range(target.as_mut_slice())], &[range(&source), unmapped], Direction::Read);
        assert_eq!(copied, 8);
        assert!(result.unwrap_err().to_string().contains("0x8 of process"));
        assert_eq!(target[..8], source);
        assert!(copy(0, &[], &[], Direction::Read).1.is_err());
        // No process has this id (PID_MAX_LIMIT of the kernel is 2^22).
        let nobody = copy(1 << 30, &[range(target.as_mut_slice())], &[range(&source)], Direction::Read);
        assert_eq!((nobody.0, nobody.1.is_err()), (0, true));
    }
}
