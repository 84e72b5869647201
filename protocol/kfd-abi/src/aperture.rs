//! The process's apertures per GPU.

use crate::layout::{abi_consts, abi_structs};

abi_structs! {
    /// Structs of this module for the header check.
    pub const STRUCTS;

    /// Apertures of one GPU. Limits are the last address, inclusive.
    struct ProcessDeviceApertures = "struct kfd_process_device_apertures", size 56 {
        /// Start of LDS.
        lds_base: u64 = 0;
        /// End of LDS.
        lds_limit: u64 = 8;
        /// Start of scratch.
        scratch_base: u64 = 16;
        /// End of scratch.
        scratch_limit: u64 = 24;
        /// Start of ordinary GPU virtual memory.
        gpuvm_base: u64 = 32;
        /// End of ordinary GPU virtual memory.
        gpuvm_limit: u64 = 40;
        /// Which GPU.
        gpu_id: u32 = 48;
        /// Padding.
        pad: u32 = 52;
    }

    /// Argument of GET_PROCESS_APERTURES, superseded by the variant for any number of GPUs.
    struct GetProcessAperturesArgs = "struct kfd_ioctl_get_process_apertures_args", size 400 {
        /// Out: the first seven GPUs.
        process_apertures: [ProcessDeviceApertures; NUM_OF_SUPPORTED_GPUS] = 0;
        /// Out: number of entries filled.
        num_of_nodes: u32 = 392;
        /// Padding.
        pad: u32 = 396;
    }

    /// Argument of GET_PROCESS_APERTURES_NEW.
    struct GetProcessAperturesNewArgs = "struct kfd_ioctl_get_process_apertures_new_args", size 16 {
        /// In: pointer to an array of [`ProcessDeviceApertures`].
        kfd_process_device_apertures_ptr: u64 = 0;
        /// In: entries in the array, 0 asks for the number only. Out: number of GPUs or of entries filled.
        num_of_nodes: u32 = 8;
        /// Padding.
        pad: u32 = 12;
    }
}

abi_consts! {
    /// Constants of this module for the header check.
    pub const CONSTS;
    Macro usize {
        /// Entries of [`GetProcessAperturesArgs::process_apertures`].
        NUM_OF_SUPPORTED_GPUS = 7;
    }
}

/// Start of the LDS aperture from GFX9 on (`MAKE_LDS_APP_BASE_V9`, kernel-internal, kfd_flat_memory.c).
pub const LDS_BASE_GFX9: u64 = 1 << 48;

/// Start of the scratch aperture from GFX9 on (`MAKE_SCRATCH_APP_BASE_V9`, kernel-internal, kfd_flat_memory.c).
pub const SCRATCH_BASE_GFX9: u64 = 2 << 48;

/// The LDS and scratch apertures span 4 GiB: `limit = base | APERTURE_LIMIT_GFX9` (kfd_flat_memory.c).
pub const APERTURE_LIMIT_GFX9: u64 = 0xffff_ffff;

/// Lowest GPU virtual address for user memory in Linux 6.12 (`AMDGPU_VA_RESERVED_BOTTOM`,
/// kernel-internal, amdgpu_vm.h): `gpuvm_base` from GFX9 on.
pub const GPUVM_BASE_GFX9: u64 = 1 << 16;
