//! libhsakmt's C types and numbers (hsakmttypes.h, hsakmt.h) as data, for ROCm 5.2.3 and 6.2.4, with nothing
//! that makes a call. Structs that have other sizes in later releases are in [`caller`].
//!
//! The C header packs to 4 bytes, so the structs here are `repr(C, packed(4))`: read and write their fields by value.
//! Pointers are `u64` addresses of the process. Unions of bit-fields are words with named
//! [`BitField`](bits::BitField)s; enums keep unknown values. `tests/headers.rs` compares all of it with
//! installed C headers.
//!
//! ```
//! use hsakmt_abi::memory::{HsaMemFlags, HsaPageSize};
//!
//! let flags = HsaMemFlags(0)
//!     .with(HsaMemFlags::HOST_ACCESS, 1)
//!     .with(HsaMemFlags::PAGE_SIZE, HsaPageSize::MB_2.0);
//! assert_eq!(flags.0, 0x60);
//! assert!(flags.is_set(HsaMemFlags::HOST_ACCESS));
//! ```

#[cfg(not(target_pointer_width = "64"))]
compile_error!("the layouts here are those of 64-bit processes");

pub mod bits;
pub mod caller;
pub mod counters;
pub mod debug;
pub mod event;
pub mod functions;
// One source for both ABI crates, which must not depend on each other.
#[path = "../../kfd-abi/src/layout.rs"]
pub mod layout;
pub mod memory;
pub mod queue;
pub mod release;
pub mod status;
pub mod svm;
pub mod topology;

/// Structs of all modules.
pub const STRUCTS: &[&[layout::CStruct]] = &[
    topology::STRUCTS,
    memory::STRUCTS,
    queue::STRUCTS,
    event::STRUCTS,
    svm::STRUCTS,
    counters::STRUCTS,
    debug::STRUCTS,
];

/// Constants of all modules.
pub const CONSTS: &[&[layout::CConst]] =
    &[topology::CONSTS, queue::CONSTS, event::CONSTS, svm::CONSTS, svm::SVM_FLAGS, debug::CONSTS];

/// Words of bit-fields of all modules.
pub const WORDS: &[&[bits::CWord]] = &[topology::WORDS, memory::WORDS, event::WORDS, counters::WORDS];

/// Enums of all modules.
pub const ENUMS: &[&[bits::CEnum]] = &[
    status::ENUMS,
    topology::ENUMS,
    memory::ENUMS,
    queue::ENUMS,
    event::ENUMS,
    svm::ENUMS,
    counters::ENUMS,
    debug::ENUMS,
];
