//! The model through its service interface, as a preload library calls it. Expected answers come from the kernel's
//! source (Linux 6.12, drivers/gpu/drm/amd); each names the function that gives it.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test fails by panicking, in its helpers too"
)]

mod caller;
mod debug;
mod dmabuf;
mod errnos;
mod gem;
mod gpuless;
mod hostile;
mod machine;
mod mapping;
mod memory;
mod profiles;
mod queue;
mod render;
mod svm;
mod sysfs;
