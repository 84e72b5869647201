//! The preload front end: serves `open`, `ioctl`, `mmap`, directory and file reads of one process
//! from a [`KfdService`].

pub mod memory;
pub mod service;

pub use memory::{Exchange, Request, UserMemory};
pub use service::*;
