//! ROCm releases of the library, as far as headers and exported names differ.

use crate::layout::Since;

/// Headers of ROCm 6 (6.2.4 in Debian 13): both releases call themselves 0.99, so a macro that came with it decides.
pub const ROCM_6: Since = Since::Defined("HSA_SMI_EVENT_MSG_SIZE");

/// Version node of every exported function.
pub const SYMBOL_VERSION: &str = "HSAKMT_1";

bitflags::bitflags! {
    /// Which releases have something.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct Releases: u8 {
        /// ROCm 5.2.3, Debian 12.
        const ROCM_5_2_3 = 1 << 0;
        /// ROCm 6.2.4, Debian 13.
        const ROCM_6_2_4 = 1 << 1;
        /// The version script of 2026 (rocm-systems 0dfa0cb3, libhsakmt.ver), its names for Windows counted in.
        const EXPORTS_2026 = 1 << 2;
        /// What ROCr 7.0 to 7.2 looks up by name in `libdtif.so` (thunk_loader.cpp).
        const ROCR_7 = 1 << 3;
        /// What ROCr's driver for virtio calls later in 2026 (rocm-systems 0877507f, amd_kfd_virtio_driver.cpp), where neither of
        /// those has it.
        const DRIVER_2026 = 1 << 4;
    }
}
