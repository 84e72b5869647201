//! `/dev/kfd` and its render nodes as data: the structs and numbers of the kernel's user API
//! (include/uapi/linux/kfd_ioctl.h up to interface 1.23, include/uapi/drm/amdgpu_drm.h,
//! drm.h and virtgpu_drm.h), with nothing that makes a call.
//!
//! Structs carry their C field names (or the C path, where the C name is no Rust name) and their exact sizes and
//! offsets, asserted at compile time; `tests/headers.rs` compares all of it with installed C headers.
//! The nouns are [`version`], [`memory`], [`queue`], [`event`], [`svm`], [`debug`], [`clock`],
//! [`aperture`]; [`kfd::IOCTLS`] and [`drm::IOCTLS`] are the tables that dispatch and allow-lists derive from.
//!
//! ```
//! use kfd_abi::{ioctl, kfd};
//!
//! let create_queue = ioctl::by_nr(kfd::IOCTLS, kfd::nr::CREATE_QUEUE).expect("in the table");
//! assert_eq!(create_queue.request, kfd::request::CREATE_QUEUE);
//! assert_eq!(create_queue.size, 96);
//! ```

pub mod aperture;
pub mod clock;
pub mod criu;
pub mod debug;
pub mod drm;
pub mod event;
pub mod ioctl;
pub mod kfd;
pub mod layout;
pub mod memory;
pub mod mmap;
pub mod profiler;
pub mod queue;
pub mod smi;
pub mod svm;
pub mod version;
pub mod virtgpu;

/// All that this crate takes from one C header.
#[derive(Clone, Copy, Debug)]
pub struct Header {
    /// The header as it is included.
    pub include: &'static str,
    /// Its structs.
    pub structs: &'static [&'static [layout::CStruct]],
    /// Its constants.
    pub consts: &'static [&'static [layout::CConst]],
    /// Its ioctls.
    pub ioctls: &'static [ioctl::Ioctl],
}

/// The headers that this crate describes.
pub const HEADERS: &[Header] = &[
    Header {
        include: "linux/kfd_ioctl.h",
        structs: &[
            version::STRUCTS,
            queue::STRUCTS,
            memory::STRUCTS,
            aperture::STRUCTS,
            clock::STRUCTS,
            event::STRUCTS,
            svm::STRUCTS,
            smi::STRUCTS,
            criu::STRUCTS,
            debug::STRUCTS,
            profiler::STRUCTS,
        ],
        consts: &[
            version::CONSTS,
            queue::CONSTS,
            memory::CONSTS,
            memory::ALLOC_FLAGS,
            aperture::CONSTS,
            event::CONSTS,
            svm::CONSTS,
            svm::SVM_FLAGS,
            smi::CONSTS,
            criu::CONSTS,
            debug::CONSTS,
            profiler::CONSTS,
        ],
        ioctls: kfd::IOCTLS,
    },
    Header {
        include: "drm/amdgpu_drm.h",
        structs: &[drm::STRUCTS, drm::amdgpu::STRUCTS],
        consts: &[drm::CONSTS, drm::amdgpu::CONSTS, drm::amdgpu::VM_PAGE_FLAGS],
        ioctls: drm::IOCTLS,
    },
    Header {
        include: "drm/virtgpu_drm.h",
        structs: &[virtgpu::STRUCTS],
        consts: &[virtgpu::CONSTS],
        ioctls: virtgpu::IOCTLS,
    },
];
