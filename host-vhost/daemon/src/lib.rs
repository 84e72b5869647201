//! `vhost-user-kfd`: the vhost-user virtio-gpu device of virtio-kfd.
//!
//! Three kinds of process. The **supervisor** ([`supervisor`]) is what the operator starts: it listens, starts
//! the others, kills and reaps them. The **device** ([`device`]) faces the guest, serves one connection of the VMM and is
//! thrown away with it. A **worker** (`kfd-worker`, another program) holds `/dev/kfd` for one context of the guest.
//!
//! In the device, in the order in which data flows: [`vhost`] (the vhost-user back-end), [`chain`] (descriptor
//! chains), [`command`] (virtio-gpu), [`session`] (contexts, blobs, frames), [`mapper`] (what is asked of the VMM). Beside it [`pool`], the
//! virtio-fs device of `--memory-socket`.

#![deny(clippy::arithmetic_side_effects)]

pub mod budget;
pub mod chain;
pub mod cli;
pub mod command;
pub mod config;
pub mod device;
pub mod mapper;
pub mod memory;
pub mod pool;
pub mod rate;
mod relay;
pub mod session;
pub mod socket;
pub mod spawn;
pub mod supervisor;
pub mod vhost;
mod vring;
mod workers;

use std::io::IsTerminal as _;

/// Sends the log to standard error, filtered.
fn init_log(filter: &str) {
    let filter = tracing_subscriber::EnvFilter::new(filter);
    // Fails only if it was done before.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none())
        .try_init();
}
