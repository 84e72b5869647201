//! `HsaMemFlags` and what they mean for KFD.

use hsakmt_abi::memory::{HsaMemFlags, HsaPageSize};
use kfd_abi::memory::AllocFlags;

use crate::thunk::refusal::{Outcome, Refusal};
use crate::thunk::settings::Settings;

/// Bytes of the page size that the flags ask for.
pub fn page_size(flags: HsaMemFlags) -> u64 {
    match HsaPageSize(flags.get(HsaMemFlags::PAGE_SIZE)) {
        HsaPageSize::KB_64 => 64 << 10,
        HsaPageSize::MB_2 => 2 << 20,
        HsaPageSize::GB_1 => 1 << 30,
        _ => 4 << 10,
    }
}

/// The first checks of `hsaKmtAllocMemoryAlign`, in the order of AMD's library (6.2.4).
pub fn check_size(size: u64, alignment: u64, flags: HsaMemFlags) -> Outcome<()> {
    let page = page_size(flags);
    if alignment != 0 && (alignment < page || !alignment.is_power_of_two()) {
        return Err(Refusal::parameter(format!(
            "Alignment is {alignment:#x}, expected a power of two of at least {page:#x}"
        )));
    }
    if size == 0 || !size.is_multiple_of(page) {
        return Err(Refusal::parameter(format!(
            "SizeInBytes is {size:#x}, expected a multiple of {page:#x}"
        )));
    }
    Ok(())
}

/// The next ones.
pub fn check(flags: HsaMemFlags, address: u64) -> Outcome<()> {
    if flags.is_set(HsaMemFlags::FIXED_ADDRESS) && address == 0 {
        return Err(Refusal::parameter("FixedAddress is set, but *MemoryAddress is NULL"));
    }
    let caching = [HsaMemFlags::COARSE_GRAIN, HsaMemFlags::EXTENDED_COHERENT, HsaMemFlags::UNCACHED];
    if caching.into_iter().filter(|flag| flags.is_set(*flag)).count() > 1 {
        return Err(Refusal::parameter(
            "MemFlags has more than one of CoarseGrain, ExtendedCoherent, Uncached",
        ));
    }
    Ok(())
}

/// Whether a GPU may execute what lies in an allocation.
pub fn is_executable(flags: HsaMemFlags, settings: &Settings) -> bool {
    settings.all_executable || flags.is_set(HsaMemFlags::EXECUTE_ACCESS)
}

/// KFD's flags, without the kind of memory.
pub fn ioc(flags: HsaMemFlags, settings: &Settings) -> AllocFlags {
    let mut ioc = AllocFlags::empty();
    let set = |flag| flags.is_set(flag);
    ioc.set(AllocFlags::EXECUTABLE, is_executable(flags, settings));
    ioc.set(AllocFlags::WRITABLE, !set(HsaMemFlags::READ_ONLY));
    ioc.set(AllocFlags::AQL_QUEUE_MEM, set(HsaMemFlags::AQL_QUEUE_MEMORY));
    ioc.set(AllocFlags::COHERENT, !set(HsaMemFlags::COARSE_GRAIN) || settings.disable_cache);
    ioc.set(
        AllocFlags::UNCACHED,
        set(HsaMemFlags::UNCACHED) || set(HsaMemFlags::AQL_QUEUE_MEMORY) || settings.disable_cache,
    );
    ioc
}

/// KFD's flags for VRAM.
pub fn vram(flags: HsaMemFlags, settings: &Settings) -> AllocFlags {
    let mut ioc = ioc(flags, settings) | AllocFlags::VRAM;
    ioc.set(AllocFlags::PUBLIC, flags.is_set(HsaMemFlags::HOST_ACCESS));
    ioc.set(AllocFlags::EXT_COHERENT, flags.is_set(HsaMemFlags::EXTENDED_COHERENT));
    ioc.set(AllocFlags::CONTIGUOUS, flags.is_set(HsaMemFlags::CONTIGUOUS));
    ioc
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flags(fields: &[hsakmt_abi::bits::BitField<HsaMemFlags>]) -> HsaMemFlags {
        fields.iter().fold(HsaMemFlags(0), |flags, field| flags.with(*field, 1))
    }

    /// Values that Debian's libhsakmt sends (facts of the ordered trace of rocminfo and SDMA copies).
    #[test]
    fn as_amds_library() {
        let settings = Settings::default();
        let fine = flags(&[HsaMemFlags::HOST_ACCESS, HsaMemFlags::UNCACHED]);
        assert_eq!((ioc(fine, &settings) | AllocFlags::USERPTR).bits(), 0xc600_0004);
        let coarse = flags(&[HsaMemFlags::NON_PAGED, HsaMemFlags::COARSE_GRAIN]);
        assert_eq!(vram(coarse, &settings).bits(), 0xc000_0001);
        let no_cache = Settings { disable_cache: true, ..settings };
        assert_eq!(vram(coarse, &no_cache).bits(), 0xc600_0001);
        // KFD_IOC_ALLOC_MEM_FLAGS_EXECUTABLE is 1 << 30 (kfd_ioctl.h).
        let newer = Settings { all_executable: false, ..settings };
        assert_eq!((ioc(fine, &newer) | AllocFlags::USERPTR).bits(), 0x8600_0004);
        assert_eq!(vram(coarse, &newer).bits(), 0x8000_0001);
        assert_eq!(vram(coarse.with(HsaMemFlags::EXECUTE_ACCESS, 1), &newer).bits(), 0xc000_0001);
    }

    #[test]
    fn arguments() {
        let none = HsaMemFlags(0);
        let check = |size, alignment, flags, address| {
            check_size(size, alignment, flags).and_then(|()| check(flags, address))
        };
        assert!(check(4096, 0, none, 0).is_ok());
        assert!(check(4096, 8192, none, 0).is_ok());
        let two_mb = none.with(HsaMemFlags::PAGE_SIZE, 2);
        for (size, alignment, flags) in [
            (0, 0, none),
            (4095, 0, none),
            (4096, 2048, none),
            (4096, 12288, none),
            (4096, 0, two_mb),
            (4096, 0, flags(&[HsaMemFlags::FIXED_ADDRESS])),
            (4096, 0, flags(&[HsaMemFlags::COARSE_GRAIN, HsaMemFlags::UNCACHED])),
        ] {
            assert!(check(size, alignment, flags, 0).is_err(), "{size} {alignment} {flags:?}");
        }
    }
}
