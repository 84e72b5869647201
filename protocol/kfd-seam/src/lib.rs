//! The preload front end: serves `open`, `ioctl`, `mmap`, directory and file reads of one process
//! from a [`KfdService`].
//!
//! A `cdylib` crate becomes a preload library with [`preload!`]; programs then run on the service by
//! `LD_PRELOAD` alone. What a preload library cannot reach: static and setuid programs, raw system calls,
//! calls inside libc (`scandir`, `fts`, `glob`), libraries loaded with `RTLD_DEEPBIND`.
//!
//! With `VIRTIO_KFD_SEAM_TRACE` in the environment, each open, ioctl and mmap that was served is told on the
//! standard error output.

#[cfg(not(all(target_os = "linux", target_env = "gnu", target_pointer_width = "64")))]
compile_error!("kfd-seam stands in for 64-bit glibc on Linux");

mod attributes;
#[doc(hidden)]
pub mod entry;
#[doc(hidden)]
pub mod export;
mod files;
mod instance;
mod kernel;
pub mod memory;
mod path;
pub mod service;
mod streams;
mod table;
mod trace;

pub use instance::{Bypass, Constructor, Preload};
pub use memory::{Exchange, Request, UserMemory};
pub use service::*;
