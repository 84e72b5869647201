//! Checkpoint and restore (CRIU_OP).

use crate::layout::{Since::KfdMinor, abi_consts, abi_structs};
use crate::version::minor;

abi_structs! {
    /// Structs of this module for the header check.
    pub const STRUCTS;

    /// Argument of CRIU_OP.
    struct CriuArgs = "struct kfd_ioctl_criu_args", size 56, since(KfdMinor(minor::CRIU)) {
        /// Pointer to an array of [`CriuDeviceBucket`].
        devices: u64 = 0;
        /// Pointer to an array of [`CriuBoBucket`].
        bos: u64 = 8;
        /// Pointer to the driver's own data.
        priv_data: u64 = 16;
        /// Its size in bytes.
        priv_data_size: u64 = 24;
        /// GPUs that the process uses.
        num_devices: u32 = 32;
        /// Buffers of the process.
        num_bos: u32 = 36;
        /// Objects of the process, for the driver.
        num_objects: u32 = 40;
        /// The process.
        pid: u32 = 44;
        /// `KFD_CRIU_OP_*`.
        op: u32 = 48;
        /// Padding, unnamed in C.
        pad as "": u32 = 52;
    }

    /// A GPU in a checkpoint.
    struct CriuDeviceBucket = "struct kfd_criu_device_bucket", size 16, since(KfdMinor(minor::CRIU)) {
        /// GPU id that the process knows.
        user_gpu_id: u32 = 0;
        /// GPU id of the hardware.
        actual_gpu_id: u32 = 4;
        /// Descriptor of its render node.
        drm_fd: u32 = 8;
        /// Padding.
        pad: u32 = 12;
    }

    /// A buffer in a checkpoint.
    struct CriuBoBucket = "struct kfd_criu_bo_bucket", size 48, since(KfdMinor(minor::CRIU)) {
        /// GPU virtual address.
        addr: u64 = 0;
        /// Size in bytes.
        size: u64 = 8;
        /// mmap offset.
        offset: u64 = 16;
        /// Out at restore: the new mmap offset.
        restored_offset: u64 = 24;
        /// GPU id that the process knows.
        gpu_id: u32 = 32;
        /// [`crate::memory::AllocFlags`].
        alloc_flags: u32 = 36;
        /// Descriptor of its dma-buf.
        dmabuf_fd: u32 = 40;
        /// Padding.
        pad: u32 = 44;
    }
}

abi_consts! {
    /// Constants of this module for the header check.
    pub const CONSTS;
    Enum u32 {
        /// Ask what there is and stop the queues.
        KFD_CRIU_OP_PROCESS_INFO = 0, since(KfdMinor(minor::CRIU));
        /// Save.
        KFD_CRIU_OP_CHECKPOINT = 1, since(KfdMinor(minor::CRIU));
        /// Let the queues run again.
        KFD_CRIU_OP_UNPAUSE = 2, since(KfdMinor(minor::CRIU));
        /// Restore.
        KFD_CRIU_OP_RESTORE = 3, since(KfdMinor(minor::CRIU));
        /// Start the restored process.
        KFD_CRIU_OP_RESUME = 4, since(KfdMinor(minor::CRIU));
    }
}
