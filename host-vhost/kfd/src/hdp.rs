//! A GPU's page of registers that flush its host data path (HDP), the way by which the CPU reaches VRAM.

use std::os::fd::AsFd;

use kfd_abi::memory::{
    KFD_MMIO_REMAP_HDP_MEM_FLUSH_CNTL, KFD_MMIO_REMAP_HDP_REG_FLUSH_CNTL, MMIO_REMAP_SIZE,
};

use crate::error::KfdError;
use crate::kfd::Kfd;
use crate::mapping::{GuestMapping, Piece};
use crate::memory::Allocation;

/// What programs store; any value flushes.
const FLUSH: u32 = 1;

/// A register of the page (`enum kfd_mmio_remap` of kfd_ioctl.h).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HdpRegister {
    /// What the CPU wrote to VRAM reaches it.
    Memory,
    /// The same for registers.
    Registers,
}

impl HdpRegister {
    /// The register at a byte offset of the page, if there is one.
    pub fn at(offset: u32) -> Option<Self> {
        match offset {
            KFD_MMIO_REMAP_HDP_MEM_FLUSH_CNTL => Some(HdpRegister::Memory),
            KFD_MMIO_REMAP_HDP_REG_FLUSH_CNTL => Some(HdpRegister::Registers),
            _ => None,
        }
    }

    const fn offset(self) -> u32 {
        match self {
            HdpRegister::Memory => KFD_MMIO_REMAP_HDP_MEM_FLUSH_CNTL,
            HdpRegister::Registers => KFD_MMIO_REMAP_HDP_REG_FLUSH_CNTL,
        }
    }
}

/// The page, mapped. Unmapped when dropped.
#[derive(Debug)]
pub struct HdpPage {
    mapping: GuestMapping,
}

#[allow(unsafe_code)] // the mapping is a pointer
// SAFETY: registers are memory of a device, which any thread may access at any time, each by one instruction (`flush`).
unsafe impl Sync for HdpPage {}

impl Kfd {
    /// Maps the page of a buffer of MMIO_REMAP, which only the process that made the buffer can (kfd_mmap).
    pub fn hdp_page(&self, buffer: &Allocation) -> Result<HdpPage, KfdError> {
        let piece = Piece { file: self.as_fd(), offset: buffer.mmap_offset, len: MMIO_REMAP_SIZE };
        Ok(HdpPage { mapping: GuestMapping::new(&[piece])? })
    }
}

impl HdpPage {
    /// Flushes. The GPU has the store when this returns: a load of the register comes after it, and waits for it (PCI keeps
    /// reads behind posted writes).
    pub fn flush(&self, register: HdpRegister) {
        let address = self.mapping.address().saturating_add(register.offset().into());
        let place = std::ptr::with_exposed_provenance_mut::<u32>(address as usize);
        #[allow(unsafe_code)] // a device's register is a pointer
        // SAFETY: both registers lie within the mapping, which is a page (`hdp_page`) at a page boundary, so that they are
        // aligned; it is writable, and lives as long as `self`. No Rust object is there.
        unsafe {
            place.write_volatile(FLUSH);
        }
        #[allow(unsafe_code)] // as above
        // SAFETY: as above; it is readable, and any bits are a u32.
        let _ = unsafe { place.read_volatile() };
    }
}
