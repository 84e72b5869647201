//! The guest's libhsakmt: AMD's `hsaKmt*` API over a virtio-gpu context.
//!
//! export (the only `extern "C"`) -> thunk (the logic: apertures, reference counts, topology) -> client (frames,
//! rings, answers) -> transport (virtgpu: the guest's render node; loop-back: a VMM in this process).

pub mod client;
#[cfg(feature = "export")]
pub mod export;
pub mod thunk;
pub mod transport;
