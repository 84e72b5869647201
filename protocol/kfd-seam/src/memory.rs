//! The process's own memory as the kernel sees it: read and written through addresses that may be
//! wrong, with `EFAULT` as the worst that can happen.
//!
//! `copy_from_user` and `copy_to_user` become `process_vm_readv(2)` and `process_vm_writev(2)` on the
//! calling process itself, which the kernel always permits (`__ptrace_may_access`: same thread group)
//! and a seccomp filter can allow for the own process. Memory without `struct page` (`VM_IO`,
//! `VM_PFNMAP`: device memory, and in a guest all that GPUs share) answers `EFAULT` as the remote side of these calls, unlike
//! `copy_from_user`. So they are made the other way round then: the local side is copied as by the kernel's own calls
//! (`process_vm_rw_pages`, mm/process_vm_access.c).

use std::io::{IoSlice, IoSliceMut};

use nix::errno::Errno;
use nix::sys::uio::{RemoteIoVec, process_vm_readv, process_vm_writev};
use nix::unistd::getpid;
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::service::{Result, UserPtr};

impl UserPtr {
    /// The null pointer.
    pub const NULL: Self = Self(0);

    /// Whether this is the null pointer.
    pub const fn is_null(self) -> bool {
        self.0 == 0
    }

    /// The address `bytes` further on; `EFAULT` past the end of the address space.
    pub fn offset(self, bytes: u64) -> Result<Self> {
        self.0.checked_add(bytes).map(Self).ok_or(Errno::EFAULT)
    }
}

/// Fault-tolerant access to the memory of the calling process.
#[derive(Clone, Copy, Debug, Default)]
pub struct UserMemory;

impl UserMemory {
    /// Fills `buffer` from `from`; `EFAULT` when a byte of it cannot be read.
    pub fn read_bytes(&self, from: UserPtr, buffer: &mut [u8]) -> Result<()> {
        let length = buffer.len();
        if length == 0 {
            return Ok(());
        }
        let remote = [remote(from, length)?];
        match process_vm_readv(getpid(), &mut [IoSliceMut::new(buffer)], &remote) {
            Ok(moved) if moved == length => Ok(()),
            Ok(_) | Err(Errno::EFAULT) => read_device(from, buffer),
            Err(errno) => Err(errno),
        }
    }

    /// Writes `bytes` to `to`; `EFAULT` when a byte of it cannot be written (what lies before that
    /// byte may have been written, as with `copy_to_user`).
    pub fn write_bytes(&self, to: UserPtr, bytes: &[u8]) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        let remote = [remote(to, bytes.len())?];
        match process_vm_writev(getpid(), &[IoSlice::new(bytes)], &remote) {
            Ok(moved) if moved == bytes.len() => Ok(()),
            Ok(_) | Err(Errno::EFAULT) => write_device(to, bytes),
            Err(errno) => Err(errno),
        }
    }

    /// Reads one structure; `EFAULT` when it cannot be read.
    pub fn read_struct<T: FromBytes>(&self, from: UserPtr) -> Result<T> {
        let mut bytes = vec![0; size_of::<T>()];
        self.read_bytes(from, &mut bytes)?;
        T::read_from_bytes(&bytes).map_err(|_| Errno::EFAULT)
    }

    /// Writes one structure; `EFAULT` when it cannot be written.
    pub fn write_struct<T: IntoBytes + Immutable>(&self, to: UserPtr, value: &T) -> Result<()> {
        self.write_bytes(to, value.as_bytes())
    }

    /// Reads `count` elements. More than `max` is `EINVAL` before anything is allocated; `EFAULT`
    /// when one cannot be read.
    pub fn read_array<T: FromBytes>(&self, from: UserPtr, count: usize, max: usize) -> Result<Vec<T>> {
        if count > max {
            return Err(Errno::EINVAL);
        }
        let size = size_of::<T>();
        let mut bytes = vec![0; count.checked_mul(size).ok_or(Errno::EINVAL)?];
        self.read_bytes(from, &mut bytes)?;
        bytes
            .chunks_exact(size.max(1))
            .map(|chunk| T::read_from_bytes(chunk).map_err(|_| Errno::EFAULT))
            .collect()
    }

    /// Writes all of `values`; `EFAULT` when one cannot be written.
    pub fn write_array<T: IntoBytes + Immutable>(&self, to: UserPtr, values: &[T]) -> Result<()> {
        self.write_bytes(to, values.as_bytes())
    }
}

/// The remote side of a copy. A range that leaves the address space is `EFAULT` as in `access_ok`.
fn remote(at: UserPtr, length: usize) -> Result<RemoteIoVec> {
    let base = usize::try_from(at.0).map_err(|_| Errno::EFAULT)?;
    base.checked_add(length).ok_or(Errno::EFAULT)?;
    Ok(RemoteIoVec { base, len: length })
}

/// One piece of memory by its address.
fn iovec(address: usize, length: usize) -> libc::iovec {
    libc::iovec { iov_base: std::ptr::with_exposed_provenance_mut(address), iov_len: length }
}

/// All or nothing of what a call has moved.
fn whole(moved: libc::ssize_t, length: usize) -> Result<()> {
    match usize::try_from(moved) {
        Ok(moved) if moved == length => Ok(()),
        Ok(_) => Err(Errno::EFAULT),
        Err(_) => Err(Errno::last()),
    }
}

/// [`UserMemory::read_bytes`] of memory without `struct page`.
#[allow(unsafe_code)] // an address that may be wrong is no slice
fn read_device(from: UserPtr, buffer: &mut [u8]) -> Result<()> {
    let address = usize::try_from(from.0).map_err(|_| Errno::EFAULT)?;
    let local = iovec(address, buffer.len());
    let remote = iovec(buffer.as_mut_ptr().expose_provenance(), buffer.len());
    // SAFETY: the call reads `local`, which may be wrong (EFAULT then), and writes to `buffer` alone, which is borrowed for it.
    let moved =
        unsafe { libc::process_vm_writev(getpid().as_raw(), &raw const local, 1, &raw const remote, 1, 0) };
    whole(moved, buffer.len())
}

/// [`UserMemory::write_bytes`] of memory without `struct page`.
#[allow(unsafe_code)] // an address that may be wrong is no slice
fn write_device(to: UserPtr, bytes: &[u8]) -> Result<()> {
    let address = usize::try_from(to.0).map_err(|_| Errno::EFAULT)?;
    let local = iovec(address, bytes.len());
    let remote = iovec(bytes.as_ptr().expose_provenance(), bytes.len());
    // SAFETY: the call reads `bytes`, and writes to `local`, which may be wrong (EFAULT then). It is memory that the program named for
    // this, as for the ioctl of a kernel: what it is to the program is the program's affair.
    let moved =
        unsafe { libc::process_vm_readv(getpid().as_raw(), &raw const local, 1, &raw const remote, 1, 0) };
    whole(moved, bytes.len())
}

/// The fields of an ioctl request number (`asm-generic/ioctl.h`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request(pub u32);

impl Request {
    /// `_IOC_NR`
    pub const fn number(self) -> u8 {
        (self.0 & 0xff) as u8
    }

    /// `_IOC_TYPE`
    pub const fn kind(self) -> u8 {
        ((self.0 >> 8) & 0xff) as u8
    }

    /// `_IOC_SIZE`, in bytes, 16383 at most.
    pub const fn size(self) -> usize {
        ((self.0 >> 16) & 0x3fff) as usize
    }

    /// `_IOC_WRITE` (the kernel's `IOC_IN`): the process hands data to the kernel.
    pub const fn copies_in(self) -> bool {
        self.0 & (1 << 30) != 0
    }

    /// `_IOC_READ` (the kernel's `IOC_OUT`): the kernel hands data to the process.
    pub const fn copies_out(self) -> bool {
        self.0 & (1 << 31) != 0
    }
}

/// How many bytes of an ioctl's argument go each way, agreed between a process that was built with one
/// size of the structure and a kernel that was built with another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exchange {
    /// Bytes copied from the process; what the kernel's structure has beyond them is zero.
    pub bytes_in: usize,
    /// Bytes copied to the process, also when the handler failed.
    pub bytes_out: usize,
}

impl Exchange {
    /// The rule of `kfd_ioctl()` (`kfd_chardev.c`): the direction is the kernel's own, the size the
    /// process's, both ways.
    pub const fn kfd(user: Request, kernel: Request) -> Self {
        Self {
            bytes_in: if kernel.copies_in() { user.size() } else { 0 },
            bytes_out: if kernel.copies_out() { user.size() } else { 0 },
        }
    }

    /// The rule of `drm_ioctl()` (`drm_ioctl.c`): the size is the process's, in the directions that
    /// both sides name.
    pub const fn drm(user: Request, kernel: Request) -> Self {
        Self {
            bytes_in: if user.copies_in() && kernel.copies_in() { user.size() } else { 0 },
            bytes_out: if user.copies_out() && kernel.copies_out() { user.size() } else { 0 },
        }
    }

    /// Runs `handler` on the kernel's structure `T`: copies `bytes_in` from the process, fills the rest
    /// with zeros, and afterwards copies `bytes_out` back, with what lies beyond `T` as the process had
    /// it. The copy out happens when the handler failed too. `EFAULT` from a copy wins over the
    /// handler's result.
    pub fn run<T, F>(self, memory: &UserMemory, argument: UserPtr, handler: F) -> Result<i32>
    where
        T: FromBytes + IntoBytes + Immutable,
        F: FnOnce(&mut T) -> Result<i32>,
    {
        let length = self.bytes_in.max(self.bytes_out).max(size_of::<T>());
        let mut buffer = vec![0; length];
        if let Some(bytes) = buffer.get_mut(..self.bytes_in) {
            memory.read_bytes(argument, bytes)?;
        }
        let (mut value, _) = T::read_from_prefix(&buffer).map_err(|_| Errno::EFAULT)?;
        let result = handler(&mut value);
        value.write_to_prefix(&mut buffer).map_err(|_| Errno::EFAULT)?;
        if let Some(bytes) = buffer.get(..self.bytes_out) {
            memory.write_bytes(argument, bytes)?;
        }
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pointer<T: ?Sized>(to: *const T) -> UserPtr {
        UserPtr(to.cast::<u8>() as u64)
    }

    #[test]
    fn bytes_go_both_ways() {
        let source = *b"doorbell";
        let mut copy = [0u8; 8];
        UserMemory.read_bytes(pointer(&source), &mut copy).unwrap();
        assert_eq!(copy, source);
        let mut target = [0u8; 8];
        UserMemory.write_bytes(pointer(&raw mut target), b"aperture").unwrap();
        assert_eq!(std::hint::black_box(target), *b"aperture");
    }

    #[test]
    fn a_wrong_address_is_efault() {
        for address in [0, 1, 4096, 0x7fff_ffff_f000, 1 << 63, u64::MAX - 3, u64::MAX] {
            let mut bytes = [0u8; 8];
            assert_eq!(
                UserMemory.read_bytes(UserPtr(address), &mut bytes),
                Err(Errno::EFAULT),
                "{address:#x}"
            );
            assert_eq!(UserMemory.write_bytes(UserPtr(address), &bytes), Err(Errno::EFAULT), "{address:#x}");
        }
    }

    /// The kernel's page of clocks (`vvar_mapping`: VM_IO, VM_PFNMAP) is memory without `struct page` that every process has.
    #[test]
    fn memory_of_a_device_is_read_as_by_the_kernel() {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let Some(line) = maps.lines().find(|line| line.ends_with("[vvar]")) else {
            eprintln!("skipped: this process has no [vvar]");
            return;
        };
        let start = u64::from_str_radix(line.split('-').next().unwrap(), 16).unwrap();
        let mut bytes = [0u8; 64];
        let remote = [remote(UserPtr(start), bytes.len()).unwrap()];
        let pinned = process_vm_readv(getpid(), &mut [IoSliceMut::new(&mut bytes)], &remote);
        assert_eq!(pinned, Err(Errno::EFAULT), "it has pages, so that this test would show nothing");
        UserMemory.read_bytes(UserPtr(start), &mut bytes).unwrap();
        assert_ne!(bytes, [0; 64]);
        assert_eq!(UserMemory.write_bytes(UserPtr(start), &bytes), Err(Errno::EFAULT), "it is read-only");
    }

    #[test]
    fn read_only_memory_is_not_written() {
        static CONSTANT: [u8; 4] = *b"text";
        assert_eq!(UserMemory.write_bytes(pointer(&CONSTANT), b"data"), Err(Errno::EFAULT));
        assert_eq!(std::hint::black_box(&CONSTANT), b"text");
    }

    #[test]
    fn nothing_is_copied_for_length_zero() {
        assert_eq!(UserMemory.read_bytes(UserPtr::NULL, &mut []), Ok(()));
        assert_eq!(UserMemory.write_bytes(UserPtr::NULL, &[]), Ok(()));
        assert_eq!(UserMemory.read_array::<u32>(UserPtr::NULL, 0, 8), Ok(vec![]));
    }

    #[test]
    fn an_array_is_bounded_before_it_is_allocated() {
        let values = [1u32, 2, 3];
        assert_eq!(UserMemory.read_array::<u32>(pointer(&values), 3, 3), Ok(vec![1, 2, 3]));
        assert_eq!(UserMemory.read_array::<u32>(pointer(&values), 4, 3), Err(Errno::EINVAL));
        assert_eq!(
            UserMemory.read_array::<u64>(pointer(&values), usize::MAX, usize::MAX),
            Err(Errno::EINVAL)
        );
    }

    // AMDKFD_IOC_GET_VERSION is _IOR('K', 0x01, 8 bytes), AMDKFD_IOC_CREATE_QUEUE _IOWR('K', 0x02, 88 bytes)
    // in Debian's linux/kfd_ioctl.h, AMDKFD_IOC_SET_EVENT _IOW('K', 0x0a, 8 bytes).
    const GET_VERSION: Request = Request(0x8008_4b01);
    const CREATE_QUEUE: Request = Request(0xc058_4b02);
    const SET_EVENT: Request = Request(0x4008_4b0a);

    #[test]
    fn request_fields() {
        assert_eq!((CREATE_QUEUE.number(), CREATE_QUEUE.kind(), CREATE_QUEUE.size()), (2, b'K', 88));
        assert!(CREATE_QUEUE.copies_in() && CREATE_QUEUE.copies_out());
        assert!(!GET_VERSION.copies_in() && GET_VERSION.copies_out());
        assert!(SET_EVENT.copies_in() && !SET_EVENT.copies_out());
    }

    fn sized(request: Request, size: u32) -> Request {
        Request(request.0 & !(0x3fff << 16) | size << 16)
    }

    #[test]
    fn a_short_structure_is_extended_with_zeros() {
        let mut user = [0x11u8; 12];
        let exchange = Exchange::kfd(sized(CREATE_QUEUE, 4), CREATE_QUEUE);
        let result = exchange.run::<[u8; 8], _>(&UserMemory, pointer(&raw mut user), |value| {
            assert_eq!(*value, [0x11, 0x11, 0x11, 0x11, 0, 0, 0, 0]);
            *value = [0x22; 8];
            Ok(7)
        });
        assert_eq!(result, Ok(7));
        assert_eq!(
            std::hint::black_box(user),
            [0x22, 0x22, 0x22, 0x22, 0x11, 0x11, 0x11, 0x11, 0x11, 0x11, 0x11, 0x11]
        );
    }

    #[test]
    fn a_long_structure_keeps_its_tail() {
        let mut user = [0x11u8; 12];
        let exchange = Exchange::kfd(sized(CREATE_QUEUE, 10), CREATE_QUEUE);
        let result = exchange.run::<[u8; 8], _>(&UserMemory, pointer(&raw mut user), |value| {
            *value = [0x22; 8];
            Ok(0)
        });
        assert_eq!(result, Ok(0));
        assert_eq!(
            std::hint::black_box(user),
            [0x22, 0x22, 0x22, 0x22, 0x22, 0x22, 0x22, 0x22, 0x11, 0x11, 0x11, 0x11]
        );
    }

    #[test]
    fn the_copy_out_happens_on_failure_too() {
        let mut user = [0x11u8; 8];
        let exchange = Exchange::kfd(sized(CREATE_QUEUE, 8), CREATE_QUEUE);
        let result = exchange.run::<[u8; 8], _>(&UserMemory, pointer(&raw mut user), |value| {
            *value = [0x33; 8];
            Err(Errno::EINVAL)
        });
        assert_eq!(result, Err(Errno::EINVAL));
        assert_eq!(std::hint::black_box(user), [0x33; 8]);
    }

    #[test]
    fn a_fault_while_copying_in_skips_the_handler() {
        let exchange = Exchange::kfd(CREATE_QUEUE, CREATE_QUEUE);
        let result = exchange.run::<[u8; 88], _>(&UserMemory, UserPtr::NULL, |_| panic!("ran"));
        assert_eq!(result, Err(Errno::EFAULT));
    }

    #[test]
    fn a_fault_while_copying_out_wins() {
        let exchange = Exchange::kfd(GET_VERSION, GET_VERSION);
        let result = exchange.run::<[u8; 8], _>(&UserMemory, UserPtr::NULL, |value| {
            assert_eq!(*value, [0; 8]);
            Err(Errno::EPERM)
        });
        assert_eq!(result, Err(Errno::EFAULT));
    }

    #[test]
    fn kfd_takes_the_direction_from_the_kernel_and_drm_from_both() {
        let user = sized(SET_EVENT, 4);
        assert_eq!(Exchange::kfd(user, CREATE_QUEUE), Exchange { bytes_in: 4, bytes_out: 4 });
        assert_eq!(Exchange::drm(user, CREATE_QUEUE), Exchange { bytes_in: 4, bytes_out: 0 });
    }
}
