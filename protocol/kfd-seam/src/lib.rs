//! The preload front end: serves `open`, `ioctl`, `mmap`, directory and file reads of one process
//! from a [`KfdService`].
//!
//! A `cdylib` crate becomes a preload library with [`preload!`]; programs then run on the service by
//! `LD_PRELOAD` alone. What a preload library cannot reach: static and setuid programs, raw system calls,
//! calls inside libc (`fts`, `nftw`), libraries loaded with `RTLD_DEEPBIND`.
//!
//! What differs from the kernel's device nodes:
//! - `read`, `write` and `poll` act on the descriptor that the service gave. `poll` says ready at once on a
//!   memfd, as the kernel does for a file without a poll operation, which `/dev/kfd` is.
//! - A descriptor that is passed on by `exec` or `SCM_RIGHTS` is that file there, and no device: requests of amdkfd and DRM answer
//!   `EBADF`. Shared memory ([`Preload::shared`]) is known wherever a library like this one is under the program.
//! - In a forked child every device file of the parent answers `EBADF`: amdkfd does so, a render node would not.
//!   Between `vfork` and `exec` no device and no directory can be opened, and no service is made (`EOPNOTSUPP`).
//! - Files have the size of their content, where sysfs says 4096, and times of 0.
//! - A path is the service's when it is absolute, begins at a directory that was opened here, or leads there from a directory above;
//!   the working directory cannot be one of the service's. A link of the real file system that leads to the service's
//!   paths is not followed to them, but for those of `/proc` to the process's own descriptors.
//! - What the service holds open has numbers that the program did not ask for ([`hidden`]).
//! - A signal handler that interrupts a call of the service and names one of its paths reaches the real system. It may not leave the call
//!   by `longjmp`.
//!
//! With `VIRTIO_KFD_SEAM_TRACE` in the environment, each open, ioctl and mmap that was served is told on the
//! standard error output.

#[cfg(not(all(target_os = "linux", target_env = "gnu", target_pointer_width = "64")))]
compile_error!("kfd-seam stands in for 64-bit glibc on Linux");

mod attributes;
mod cancellation;
#[doc(hidden)]
pub mod entry;
#[doc(hidden)]
pub mod export;
mod files;
pub mod hidden;
mod instance;
mod kernel;
mod links;
pub mod memory;
mod path;
pub mod service;
mod streams;
pub mod sysfs;
mod table;
mod trace;
pub mod tree;

pub use instance::{Bypass, Constructor, Preload};
pub use memory::{Exchange, Request, UserMemory};
pub use service::*;
