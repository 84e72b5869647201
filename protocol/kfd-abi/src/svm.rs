//! Shared virtual memory: attributes of address ranges, and XNACK.

use crate::layout::{Since::KfdMinor, abi_consts, abi_flags, abi_structs};
use crate::version::minor;

abi_structs! {
    /// Structs of this module for the header check.
    pub const STRUCTS;

    /// One attribute of a range.
    struct SvmAttribute = "struct kfd_ioctl_svm_attribute", size 8, since(KfdMinor(minor::SVM)) {
        /// `KFD_IOCTL_SVM_ATTR_*`.
        kind as "type": u32 = 0;
        /// A GPU id, [`SvmFlags`] or a number, by type.
        value: u32 = 4;
    }

    /// Argument of SVM, followed by `nattr` [`SvmAttribute`]s; a caller adds their size to the
    /// request number's.
    struct SvmArgs = "struct kfd_ioctl_svm_args", size 24, since(KfdMinor(minor::SVM)) {
        /// In: start of the range, page-aligned.
        start_addr: u64 = 0;
        /// In: its size in bytes, page-aligned.
        size: u64 = 8;
        /// In: `KFD_IOCTL_SVM_OP_*`.
        op: u32 = 16;
        /// In: number of attributes.
        nattr: u32 = 20;
    }

    /// Argument of SET_XNACK_MODE.
    struct SetXnackModeArgs = "struct kfd_ioctl_set_xnack_mode_args", size 4, since(KfdMinor(minor::SVM)) {
        /// In: positive on, 0 off, negative ask. Out: the mode.
        xnack_enabled: i32 = 0;
    }
}

abi_consts! {
    /// Constants of this module for the header check.
    pub const CONSTS;
    Enum u32 {
        /// Set attributes.
        KFD_IOCTL_SVM_OP_SET_ATTR = 0, since(KfdMinor(minor::SVM));
        /// Ask for attributes.
        KFD_IOCTL_SVM_OP_GET_ATTR = 1, since(KfdMinor(minor::SVM));
        /// Location: system memory.
        KFD_IOCTL_SVM_LOCATION_SYSMEM = 0, since(KfdMinor(minor::SVM));
        /// Location: none in particular.
        KFD_IOCTL_SVM_LOCATION_UNDEFINED = 0xffff_ffff, since(KfdMinor(minor::SVM));
        /// Where memory should be: a GPU id or a location.
        KFD_IOCTL_SVM_ATTR_PREFERRED_LOC = 0, since(KfdMinor(minor::SVM));
        /// Where to migrate memory to now.
        KFD_IOCTL_SVM_ATTR_PREFETCH_LOC = 1, since(KfdMinor(minor::SVM));
        /// This GPU may access.
        KFD_IOCTL_SVM_ATTR_ACCESS = 2, since(KfdMinor(minor::SVM));
        /// This GPU may access without migration.
        KFD_IOCTL_SVM_ATTR_ACCESS_IN_PLACE = 3, since(KfdMinor(minor::SVM));
        /// This GPU may not access.
        KFD_IOCTL_SVM_ATTR_NO_ACCESS = 4, since(KfdMinor(minor::SVM));
        /// Flags to set.
        KFD_IOCTL_SVM_ATTR_SET_FLAGS = 5, since(KfdMinor(minor::SVM));
        /// Flags to clear.
        KFD_IOCTL_SVM_ATTR_CLR_FLAGS = 6, since(KfdMinor(minor::SVM));
        /// Migration granularity, log2 of pages.
        KFD_IOCTL_SVM_ATTR_GRANULARITY = 7, since(KfdMinor(minor::SVM));
    }
}

abi_flags! {
    /// Bits of [`SvmFlags`] for the header check.
    pub const SVM_FLAGS;
    /// Flags of a range.
    Macro SvmFlags: u32 = "KFD_IOCTL_SVM_FLAG_" {
        /// The host can always access.
        HOST_ACCESS = 0x01, since(KfdMinor(minor::SVM));
        /// Fine-grained coherence between devices.
        COHERENT = 0x02, since(KfdMinor(minor::SVM));
        /// Any GPU of the same hive may hold the memory.
        HIVE_LOCAL = 0x04, since(KfdMinor(minor::SVM));
        /// GPUs only read.
        GPU_RO = 0x08, since(KfdMinor(minor::SVM));
        /// GPUs may execute.
        GPU_EXEC = 0x10, since(KfdMinor(minor::SVM));
        /// GPUs mostly read.
        GPU_READ_MOSTLY = 0x20, since(KfdMinor(minor::SVM));
        /// GPU mappings are kept as without XNACK.
        GPU_ALWAYS_MAPPED = 0x40, since(KfdMinor(minor::UNIFIED_CTX_SAVE_AREA));
        /// Coherent between devices by device-scope atomics. Came within minor 14.
        EXT_COHERENT = 0x80, since(KfdMinor(minor::GEM_VA));
    }
}
