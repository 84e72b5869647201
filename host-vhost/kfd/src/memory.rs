//! GPU memory: allocate, map, unmap, free.

use std::os::fd::AsFd;

use kfd_abi::kfd::request;
use kfd_abi::memory::{
    AllocFlags, AllocMemoryOfGpuArgs, FreeMemoryOfGpuArgs, GetAvailableMemoryArgs, MapMemoryToGpuArgs,
    UnmapMemoryFromGpuArgs,
};
use nix::errno::Errno;

use crate::call::{address, arguments, ioctl};
use crate::error::KfdError;
use crate::kfd::Kfd;
use crate::mapping::GuestMapping;

arguments! {
    AllocMemoryOfGpuArgs = "AMDKFD_IOC_ALLOC_MEMORY_OF_GPU", request::ALLOC_MEMORY_OF_GPU;
    FreeMemoryOfGpuArgs = "AMDKFD_IOC_FREE_MEMORY_OF_GPU", request::FREE_MEMORY_OF_GPU;
    MapMemoryToGpuArgs = "AMDKFD_IOC_MAP_MEMORY_TO_GPU", request::MAP_MEMORY_TO_GPU;
    UnmapMemoryFromGpuArgs = "AMDKFD_IOC_UNMAP_MEMORY_FROM_GPU", request::UNMAP_MEMORY_FROM_GPU;
    GetAvailableMemoryArgs = "AMDKFD_IOC_AVAILABLE_MEMORY", request::AVAILABLE_MEMORY;
}

/// KFD's own handle of a buffer: valid in this process only, never shown to a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KfdHandle(u64);

impl KfdHandle {
    /// The number, for other calls.
    pub(crate) const fn number(self) -> u64 {
        self.0
    }

    /// A handle that another call gave.
    pub(crate) const fn from_number(number: u64) -> Self {
        KfdHandle(number)
    }
}

/// What to allocate.
#[derive(Clone, Copy, Debug)]
pub struct NewBuffer {
    /// GPU address, chosen by the caller.
    pub va: u64,
    /// Bytes.
    pub size: u64,
    /// The GPU.
    pub gpu_id: u32,
    /// Kind and use. USERPTR only through [`Kfd::alloc_userptr`].
    pub flags: AllocFlags,
}

/// A buffer that the kernel made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// For the other calls.
    pub handle: KfdHandle,
    /// Where the buffer's memory lies in the render node's file, for mmap, in bytes. Means nothing for user pointers.
    pub mmap_offset: u64,
}

/// How far a map or unmap came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapOutcome {
    /// GPUs of the list that are done, from its start.
    pub done: u32,
    /// What ended it early.
    pub errno: Option<Errno>,
}

impl Kfd {
    /// `AMDKFD_IOC_ALLOC_MEMORY_OF_GPU` of any kind but USERPTR, whose memory this call would not know.
    pub fn alloc(&self, buffer: &NewBuffer) -> Result<Allocation, KfdError> {
        if buffer.flags.contains(AllocFlags::USERPTR) {
            return Err(KfdError::new(
                "AMDKFD_IOC_ALLOC_MEMORY_OF_GPU",
                "USERPTR without a mapping",
                Errno::EINVAL,
            ));
        }
        self.alloc_at(buffer, 0)
    }

    /// `AMDKFD_IOC_ALLOC_MEMORY_OF_GPU` over the memory of `mapping`, which has to outlive the buffer: the kernel
    /// takes the pages from its addresses again and again.
    pub fn alloc_userptr(&self, buffer: &NewBuffer, mapping: &GuestMapping) -> Result<Allocation, KfdError> {
        // KFD shows an AQL ring twice in a row and takes half of its size from the caller.
        let aql = buffer.flags.contains(AllocFlags::AQL_QUEUE_MEM);
        let bytes = if aql { buffer.size / 2 } else { buffer.size };
        if mapping.len() != bytes || !buffer.flags.contains(AllocFlags::USERPTR) {
            let found = format!("{:?}, mapping of {} bytes", buffer, mapping.len());
            return Err(KfdError::new("AMDKFD_IOC_ALLOC_MEMORY_OF_GPU", found, Errno::EINVAL));
        }
        self.alloc_at(buffer, mapping.address())
    }

    fn alloc_at(&self, buffer: &NewBuffer, cpu_address: u64) -> Result<Allocation, KfdError> {
        let mut args = AllocMemoryOfGpuArgs {
            va_addr: buffer.va,
            size: buffer.size,
            mmap_offset: cpu_address,
            gpu_id: buffer.gpu_id,
            flags: buffer.flags.bits(),
            ..Default::default()
        };
        ioctl(self.as_fd(), &mut args, || {
            format!(
                "va_addr {:#x}, size {:#x}, gpu_id {}, flags {:#x}",
                buffer.va,
                buffer.size,
                buffer.gpu_id,
                buffer.flags.bits()
            )
        })?;
        Ok(Allocation { handle: KfdHandle(args.handle), mmap_offset: args.mmap_offset })
    }

    /// `AMDKFD_IOC_FREE_MEMORY_OF_GPU`; EBUSY while a GPU maps it, EPERM for the event page.
    pub fn free(&self, handle: KfdHandle) -> Result<(), KfdError> {
        let mut args = FreeMemoryOfGpuArgs { handle: handle.0 };
        ioctl(self.as_fd(), &mut args, || format!("handle {:#x}", handle.0))
    }

    /// `AMDKFD_IOC_MAP_MEMORY_TO_GPU` on the GPUs of the list, in order.
    pub fn map(&self, handle: KfdHandle, gpu_ids: &[u32]) -> MapOutcome {
        let mut list = gpu_ids.to_vec();
        let mut args = MapMemoryToGpuArgs {
            handle: handle.0,
            device_ids_array_ptr: address(&mut list),
            n_devices: gpu_ids.len() as u32,
            n_success: 0,
        };
        let result = ioctl(self.as_fd(), &mut args, String::new);
        MapOutcome { done: args.n_success, errno: result.err().map(|error| error.errno) }
    }

    /// `AMDKFD_IOC_UNMAP_MEMORY_FROM_GPU` on the GPUs of the list, in order.
    pub fn unmap(&self, handle: KfdHandle, gpu_ids: &[u32]) -> MapOutcome {
        let mut list = gpu_ids.to_vec();
        let mut args = UnmapMemoryFromGpuArgs {
            handle: handle.0,
            device_ids_array_ptr: address(&mut list),
            n_devices: gpu_ids.len() as u32,
            n_success: 0,
        };
        let result = ioctl(self.as_fd(), &mut args, String::new);
        MapOutcome { done: args.n_success, errno: result.err().map(|error| error.errno) }
    }

    /// `AMDKFD_IOC_AVAILABLE_MEMORY`: bytes of VRAM that could be allocated now.
    pub fn available_memory(&self, gpu_id: u32) -> Result<u64, KfdError> {
        let mut args = GetAvailableMemoryArgs { gpu_id, ..Default::default() };
        ioctl(self.as_fd(), &mut args, || format!("gpu_id {gpu_id}"))?;
        Ok(args.available)
    }
}
