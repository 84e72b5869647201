//! The worker: one process for each guest context, with a KFD process of its own.
//!
//! It gets frames that the device has checked for structure, runs their requests on `/dev/kfd` and the render
//! nodes, and answers. `serve` is the loop, `dispatch` runs a frame, `call` has a file for each noun of the call table.
//! The worker trusts neither the guest nor the device: handles are looked up, sizes are bounded, GPU ids are
//! those of this VM, and no number from a message is ever used as an address of this process but one: `exceptions` makes a
//! page of its own there, where nothing else can be.

#![cfg_attr(not(test), deny(clippy::arithmetic_side_effects))]

mod archive;
mod blob;
mod budget;
mod buffer;
mod call;
mod context;
mod dispatch;
mod exceptions;
mod failure;
mod handle;
mod memory;
mod pump;
mod queue;
mod range;
mod rings;
mod select;
mod serve;
mod share;
mod smi;
mod start;
mod throttle;

pub use serve::{ServeError, serve};

/// The environment variable that says that the KFD model stands under this process (its value names the model's
/// profile). It widens the sandbox by what the model needs.
pub const MODEL_VARIABLE: &str = "VIRTIO_KFD_MODEL";
