//! The worker as a process, driven over its channel as the device does, on the KFD model.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::panic)]

mod event;
mod exceptions;
mod hdp;
mod memory;
mod open;
mod queue;
mod range;
mod sandbox;
mod smi;
mod support;
