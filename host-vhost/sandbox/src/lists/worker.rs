//! The worker.

use std::ops::Range;
use std::os::fd::RawFd;

use kfd_abi::ioctl::by_nr;
use virtio_kfd_protocol::CALLS;
use virtio_kfd_protocol::limits::MAX_SMI_STREAMS;

use crate::seccomp::{Check, Rule, rule};

/// The descriptors of system management events, which are reserved at a worker's start: it reads and writes no others. They lie
/// above what a worker has by then, and below what a model in it keeps for itself (`kfd_seam::hidden`). The
/// length is a power of two, and the start a multiple of it, so that a filter can tell them by their high bits.
pub const SMI_DESCRIPTORS: Range<RawFd> = 128..192;
const _: () = assert!(MAX_SMI_STREAMS < 64, "one of them ends waits");

/// A worker whose channel is descriptor `channel`: the runtime's calls, messages on that channel, and
/// the ioctls of the call table.
pub fn worker(channel: RawFd) -> Vec<Rule> {
    let on_channel = Check::Is(0, channel.cast_unsigned());
    let mut rules = super::runtime();
    rules.push(rule!(SYS_recvmsg, "messages of the device", on_channel));
    rules.push(rule!(SYS_sendmsg, "answers to the device", on_channel));
    let smi = |argument| Check::Within(argument, !63, SMI_DESCRIPTORS.start.cast_unsigned());
    rules.push(rule!(SYS_dup3, "streams of events get the descriptors that are reserved for them", smi(1)));
    rules.push(rule!(SYS_read, "events", smi(0)));
    rules.push(rule!(SYS_write, "which events, and what ends a wait for them", smi(0)));
    rules.push(rule!(SYS_ppoll, "a wait for events"));
    for request in requests() {
        rules.push(rule!(SYS_ioctl, "the call table", Check::Is(1, request)));
    }
    rules
}

/// The request numbers of all ioctls that the call table names, sorted.
pub fn requests() -> Vec<u32> {
    let kfd = CALLS.iter().flat_map(|call| call.kfd_ioctls).map(|nr| by_nr(kfd_abi::kfd::IOCTLS, *nr));
    let drm = CALLS.iter().flat_map(|call| call.drm_ioctls).map(|nr| by_nr(kfd_abi::drm::IOCTLS, *nr));
    let mut requests: Vec<u32> = kfd.chain(drm).flatten().map(|ioctl| ioctl.request).collect();
    requests.sort_unstable();
    requests.dedup();
    requests
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// Written out by hand from linux/kfd_ioctl.h and drm/amdgpu_drm.h (Linux 6.12), so that a change of the call table
    /// that widens the sandbox shows.
    #[test]
    fn the_ioctls_by_number() {
        let expected: HashSet<u32> = [
            0x8008_4b01, // AMDKFD_IOC_GET_VERSION
            0x4020_4b04, // AMDKFD_IOC_SET_MEMORY_POLICY
            0xc060_4b02, // AMDKFD_IOC_CREATE_QUEUE
            0xc008_4b03, // AMDKFD_IOC_DESTROY_QUEUE
            0xc028_4b05, // AMDKFD_IOC_GET_CLOCK_COUNTERS
            0x4018_4b07, // AMDKFD_IOC_UPDATE_QUEUE
            0xc020_4b08, // AMDKFD_IOC_CREATE_EVENT
            0x4008_4b09, // AMDKFD_IOC_DESTROY_EVENT
            0x4008_4b0a, // AMDKFD_IOC_SET_EVENT
            0x4008_4b0b, // AMDKFD_IOC_RESET_EVENT
            0xc018_4b0c, // AMDKFD_IOC_WAIT_EVENTS
            0xc010_4b11, // AMDKFD_IOC_SET_SCRATCH_BACKING_VA
            0xc028_4b12, // AMDKFD_IOC_GET_TILE_CONFIG
            0x4018_4b13, // AMDKFD_IOC_SET_TRAP_HANDLER
            0xc010_4b14, // AMDKFD_IOC_GET_PROCESS_APERTURES_NEW
            0x4008_4b15, // AMDKFD_IOC_ACQUIRE_VM
            0xc028_4b16, // AMDKFD_IOC_ALLOC_MEMORY_OF_GPU
            0x4008_4b17, // AMDKFD_IOC_FREE_MEMORY_OF_GPU
            0xc018_4b18, // AMDKFD_IOC_MAP_MEMORY_TO_GPU
            0xc018_4b19, // AMDKFD_IOC_UNMAP_MEMORY_FROM_GPU
            0x4010_4b1a, // AMDKFD_IOC_SET_CU_MASK
            0xc018_4b1b, // AMDKFD_IOC_GET_QUEUE_WAVE_STATE
            0xc020_4b1c, // AMDKFD_IOC_GET_DMABUF_INFO
            0xc018_4b1d, // AMDKFD_IOC_IMPORT_DMABUF
            0xc010_4b1e, // AMDKFD_IOC_ALLOC_QUEUE_GWS
            0xc008_4b1f, // AMDKFD_IOC_SMI_EVENTS
            0xc004_4b21, // AMDKFD_IOC_SET_XNACK_MODE
            0xc010_4b23, // AMDKFD_IOC_AVAILABLE_MEMORY
            0xc010_4b24, // AMDKFD_IOC_EXPORT_DMABUF
            0xc010_4b25, // AMDKFD_IOC_RUNTIME_ENABLE
            0xc040_6400, // DRM_IOCTL_VERSION
            0x4008_6409, // DRM_IOCTL_GEM_CLOSE
            0xc00c_642e, // DRM_IOCTL_PRIME_FD_TO_HANDLE
            0x4020_6445, // DRM_IOCTL_AMDGPU_INFO
            0xc120_6446, // DRM_IOCTL_AMDGPU_GEM_METADATA
            0x4040_6448, // DRM_IOCTL_AMDGPU_GEM_VA, with the fields of drm/amdgpu_drm.h since 6.16
        ]
        .into();
        assert_eq!(requests().into_iter().collect::<HashSet<u32>>(), expected);
    }

    #[test]
    fn every_ioctl_of_the_call_table_is_known() {
        for call in CALLS {
            assert!(
                call.kfd_ioctls.iter().all(|nr| by_nr(kfd_abi::kfd::IOCTLS, *nr).is_some()),
                "{}",
                call.name
            );
            assert!(
                call.drm_ioctls.iter().all(|nr| by_nr(kfd_abi::drm::IOCTLS, *nr).is_some()),
                "{}",
                call.name
            );
        }
    }
}
